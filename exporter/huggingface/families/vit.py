"""ViT and DeiT: encoders over the patches of a picture, norm first."""

from __future__ import annotations

from typing import Any

from engine.wording import shortened
from exporter.huggingface.conversion import (
    SQUEEZED,
    ModuleNames,
    NameTable,
    StoredWeight,
    layers,
    modules,
)
from exporter.huggingface.family import Family, Options, Original, refused
from exporter.huggingface.pictures import PREPROCESSOR_NAME, image_options
from exporter.huggingface.stacks.encoder import LAYERS, classes
from exporter.models.config import ImageConfig, TransformerConfig

_FIXED = {"architecture": "vision-encoder", "norm_position": "first", "positions.kind": "learned"}
_HEADS: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": {},
    "ViTModel": {"labels": ()},
    "DeiTForImageClassification": {"distillation": "token"},
    "DeiTForImageClassificationWithTeacher": {"distillation": "head"},
    "DeiTModel": {"distillation": "token", "labels": ()},
}


def _computed(original: Original) -> Options:
    named = original.architecture
    if named not in _HEADS:
        raise ValueError(refused("architectures", named, tuple(_HEADS)))
    if original.pictures is None:
        raise ValueError(
            f"{PREPROCESSOR_NAME} is missing; write it with transformers: "
            "`AutoImageProcessor.from_pretrained(NAME).save_pretrained(DIR)`"
        )
    size, channels = _edge(original, "image_size"), original.config.num_channels
    head = _HEADS[named]
    image = ImageConfig(
        size=size,
        patch_size=_edge(original, "patch_size"),
        channels=channels,
        distillation=head.get("distillation", "none"),
        **image_options(original.pictures, size, channels),
    )
    of_labels = {"labels": ()} if "labels" in head else classes(original)
    return {**of_labels, "image": image}


def _edge(original: Original, name: str) -> int:
    """Return height and width as one number."""
    given = getattr(original.config, name)
    height, width = (given, given) if isinstance(given, int) else (*given, None, None)[:2]
    if height != width or height is None or not isinstance(height, int):
        raise ValueError(
            f"{name} is {shortened(str(given))}; supported: square pictures only, in square patches"
        )
    return height


def _notes(original: Original) -> list[str]:
    """Say whose filters resize, and what becomes of deep pictures."""
    return [
        "pictures are resized by Pillow, as transformers does it without torchvision, whose "
        "filters differ somewhat; gray ones of 16 bits are scaled to 8, not cut at 255"
    ]


def _weights(config: TransformerConfig) -> NameTable:
    is_deit = config.image is not None and config.image.distillation != "none"
    body = "deit" if is_deit else "vit"
    embeddings, token = f"{body}.embeddings", (SQUEEZED, SQUEEZED)
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
            (f"{embeddings}.position_embeddings",), (SQUEEZED,)
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


def _family(title: str, model_type: str) -> Family:
    return Family(
        title=title,
        model_types=(model_type,),
        fixed=_FIXED,
        options=LAYERS,
        computed=_computed,
        supported={"qkv_bias": (True,), "num_channels": (1, 3)},
        notes=_notes,
        weights=_weights,
        body=f"{model_type}.",
        ignored=rf"({model_type}\.)?(pooler\..*|embeddings\.mask_token)",
    )


VIT, DEIT = _family("ViT", "vit"), _family("DeiT", "deit")
