"""ViT and DeiT: encoders over the patches of a picture, norm first."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from engine.wording import shortened
from exporter.huggingface.conversion import (
    ModuleNames,
    NameTable,
    Squeezed,
    StoredWeight,
    layers,
    modules,
)
from exporter.huggingface.encoder_heads import LabelledConfig
from exporter.huggingface.family import Activation, Family, SpecialTokens
from exporter.huggingface.pictures import PREPROCESSOR_NAME, Preprocessor
from exporter.huggingface.stack import StackConfig
from exporter.models.config import ImageConfig, PositiveInt, TransformerConfig

_HEADS: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": {},
    "ViTModel": {"labels": ()},
    "DeiTForImageClassification": {"distillation": "token"},
    "DeiTForImageClassificationWithTeacher": {"distillation": "head"},
    "DeiTModel": {"distillation": "token", "labels": ()},
}


class ViTConfig(StackConfig, LabelledConfig):
    """`config.json` of a ViT or DeiT."""

    model_type: Literal["vit", "deit"]
    architectures: tuple[
        Literal[
            "ViTForImageClassification",
            "ViTModel",
            "DeiTForImageClassification",
            "DeiTForImageClassificationWithTeacher",
            "DeiTModel",
        ]
    ]
    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 12
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 3072
    hidden_act: Activation = "gelu"
    norm_eps: float = Field(1e-12, alias="layer_norm_eps")
    image_size: PositiveInt = 224
    patch_size: PositiveInt = 16
    num_channels: Literal[1, 3] = 3
    qkv_bias: Literal[True] = True
    preprocessor_config: Preprocessor | None = None

    @field_validator("image_size", "patch_size", mode="before")
    @classmethod
    def _as_one_edge(cls, given: object, info: ValidationInfo) -> object:
        """Take height and width for one number where they are equal."""
        if not isinstance(given, list | tuple):
            return given
        if len(given) != 2 or given[0] != given[1]:
            raise ValueError(
                f"{info.field_name} is {shortened(str(given))}; supported: square pictures only, "
                "in square patches"
            )
        return given[0]

    @property
    def has_labels(self) -> bool:
        """Whether its class has a head of labels."""
        return "labels" not in _HEADS[self.architectures[0]]

    def notes(self) -> list[str]:
        """Say whose filters resize, and what becomes of deep pictures, besides."""
        return [
            *super().notes(),
            "pictures are resized by Pillow, as transformers does it without torchvision, whose "
            "filters differ somewhat; gray ones of 16 bits are scaled to 8, not cut at 255",
        ]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.preprocessor_config is None:
            raise ValueError(
                f"{PREPROCESSOR_NAME} is missing; write it with transformers: "
                "`AutoImageProcessor.from_pretrained(NAME).save_pretrained(DIR)`"
            )
        _image(self)
        return self


def _image(given: ViTConfig) -> ImageConfig:
    """Return what the model sees; ValueError if the picture's settings do not fit it."""
    assert given.preprocessor_config is not None, "it was checked"
    size, channels = given.image_size, given.num_channels
    return ImageConfig(
        size=size,
        patch_size=given.patch_size,
        channels=channels,
        distillation=_HEADS[given.architectures[0]].get("distillation", "none"),
        **given.preprocessor_config.image_options(size, channels),
    )


def _config(given: ViTConfig, tokens: SpecialTokens) -> TransformerConfig:
    head = _HEADS[given.architectures[0]]
    return TransformerConfig(
        family="vit",
        **given.layer_options,
        num_encoder_layers=given.num_hidden_layers,
        norm_position="first",
        positions="learned",
        labels=head.get("labels", given.labels),
        image=_image(given),
    )


def _weights(config: TransformerConfig) -> NameTable:
    is_deit = config.image is not None and config.image.distillation != "none"
    body = "deit" if is_deit else "vit"
    embeddings, token = f"{body}.embeddings", (Squeezed(), Squeezed())
    around: ModuleNames = {
        "embeddings.projection": f"{embeddings}.patch_embeddings.projection",
        "encoder.final_norm": f"{body}.layernorm",
        "classifier": ("classifier", "cls_classifier"),
        "distillation_classifier": "distillation_classifier",
    }
    return {
        "embeddings.class_token": StoredWeight((f"{embeddings}.cls_token",), token),
        "embeddings.distillation_token": StoredWeight((f"{embeddings}.distillation_token",), token),
        "embeddings.positions.weight": StoredWeight(
            (f"{embeddings}.position_embeddings",), (Squeezed(),)
        ),
        **layers(
            "encoder",
            f"{body}.encoder.layer",
            query="attention.attention.query",
            key="attention.attention.key",
            value="attention.attention.value",
            output="attention.output.dense",
            attention_norm="layernorm_before",
            up="intermediate.dense",
            down="output.dense",
            feed_forward_norm="layernorm_after",
        ),
        **modules(around),
    }


def _family(title: str, model_type: str) -> Family[ViTConfig]:
    return Family(
        title=title,
        model_types=(model_type,),
        fields=ViTConfig,
        to_config=_config,
        weights=_weights,
        abilities=("classify", "embed"),
        body=f"{model_type}.",
        ignored=rf"({model_type}\.)?(pooler\..*|embeddings\.mask_token)",
        files=(PREPROCESSOR_NAME,),
    )


VIT, DEIT = _family("ViT", "vit"), _family("DeiT", "deit")
