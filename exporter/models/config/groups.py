"""The options of a model in groups, and the types of options with the bounds that all have."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from engine.package.manifest import (
    MAX_HEADS,
    MAX_IMAGE_SIZE,
    MAX_LAYERS,
    MAX_LENGTH,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
    LabelScores,
    Resample,
)
from engine.wording import shortened

NumLayers = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
NumHeads = Annotated[int, Field(gt=0, le=MAX_HEADS)]
Width = Annotated[int, Field(gt=0, le=MAX_WIDTH)]
Length = Annotated[int, Field(ge=0, le=MAX_LENGTH)]
VocabSize = Annotated[int, Field(ge=0, le=MAX_VOCAB_SIZE)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_VOCAB_SIZE)]
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
PositiveFloat = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class Options(BaseModel):
    """Options that are read from a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class AttentionConfig(Options):
    """How queries score keys, and what becomes of the values."""

    bias: bool = True
    output: bool = True  # W_O; False: the values of a single head are the output
    output_bias: bool | None = None  # None: as bias
    score: Literal["dot", "additive"] = "dot"  # additive: encoders
    normalizer: Literal["softmax", "relu"] = "softmax"  # relu: encoders
    scale: PositiveFloat | None = None  # None: 1 / sqrt(key_dim)
    softcap: PositiveFloat | None = None  # c * tanh(score / c)
    qk_norm: bool = False  # mean-square norms of every query and key
    # A query sees so many keys, the one at its own place among them: before it, in an encoder on
    # either side; None: all
    window: PositiveInt | None = None
    windowed_layers: tuple[int, ...] | None = None  # None: all
    dropout: Probability = 0.0

    def layer_window(self, layer: int) -> int | None:
        """Return how many keys a query of this layer sees, None for all before it."""
        is_windowed = self.windowed_layers is None or layer in self.windowed_layers
        return self.window if is_windowed else None


class RotaryScaling(Options):
    """How rotary positions turn where texts may be longer than those of the first training."""

    frequencies: tuple[PositiveFloat, ...]  # the angle from one place to the next, of each wave
    attention_factor: PositiveFloat = 1.0  # scales cosines and sines: scores grow by its square
    original_max_len: PositiveInt | None = None  # tokens of the texts of the first training
    least_len: PositiveInt = 1  # tokens of the shortest text that the original turns so


class PositionConfig(Options):
    """How a model tells places apart."""

    # sinusoidal: sines and cosines in turn, as in the paper; sinusoidal_halves: all sines, then
    # all cosines (Marian); sinusoidal_tensor2tensor: likewise, and the last wave is the slowest of
    # the paper (M2M); rotary: queries and keys are turned, nothing is added; relative:
    # scores are biased by buckets of distances, nothing is added (T5)
    kind: Literal[
        "sinusoidal",
        "sinusoidal_halves",
        "sinusoidal_tensor2tensor",
        "learned",
        "rotary",
        "relative",
    ] = "sinusoidal"
    offset: Length = 0  # the number of the first sinusoidal place
    # Numbers that sinusoidal places are rounded to, where they were kept so in an original
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    relative_buckets: PositiveInt = 32
    relative_max_distance: PositiveInt = 128  # one bucket from here on
    rotary_base: PositiveFloat = 10000.0
    rotary_scaling: RotaryScaling | None = None  # None: the base alone says it
    rotary_dim: PositiveInt | None = None  # the part of a head that turns; None: all
    # The base in layers that have a window, where nothing is stretched; None: as elsewhere
    local_rotary_base: PositiveFloat | None = None


class FeedForwardConfig(Options):
    """The two products, and the activation between them."""

    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    gated: bool = False  # down(activation(gate(x)) * up(x)), Shazeer 2020
    bias: bool = True
    # In a package in float16 the second product stays in float32, and what it is added to: T5's
    # values there pass the largest number of float16 on some texts.
    float32_output: bool = False
    dropout: Probability = 0.0  # the inner layer, behind its activation


Pooler = Literal["tanh", "relu", "gelu", "gelu_tanh", "silu", "linear", "none"]


class HeadConfig(Options):
    """From vectors of tokens to the one of a text, and to labels."""

    each_token: bool = False  # every token has a label, not the text
    pooling: Literal["first", "mean", "max"] = "first"  # the vector of a text
    # A dense layer behind it, or on each token, by its activation; None: tanh for a text
    pooler: Pooler | None = None
    pooler_bias: bool = True
    pooler_norm: bool = False  # behind the activation
    embedding_dim: Width | None = None  # the pooler's width; None: d_model
    normalize: bool = False  # vectors of length 1
    # The function from logits to probabilities: one label of many, or each by itself; none: logits
    label_scores: LabelScores = "softmax"


ImageSize = Annotated[int, Field(gt=0, le=MAX_IMAGE_SIZE)]


class ImageConfig(Options):
    """The images that a vision model reads."""

    size: ImageSize  # height and width in pixels
    patch_size: ImageSize
    channels: Literal[1, 3] = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # pixel_values = (pixel / 255 - mean) / std
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    # Height and width that a picture gets before its middle is cut out; None: `size`
    resize: ImageSize | None = None
    keep_ratio: bool = False  # only its shorter edge becomes that
    resample: Resample = "bilinear"
    # DeiT: a second token beside the class token; with a head, its logits and the class token's
    # are averaged
    distillation: Literal["none", "token", "head"] = "none"

    @property
    def num_special(self) -> int:
        """Tokens before the patches."""
        return 1 if self.distillation == "none" else 2

    @property
    def num_tokens(self) -> int:
        """Patches, and the tokens before them."""
        return (self.size // self.patch_size) ** 2 + self.num_special

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.size % self.patch_size:
            problems.append(f"size ({self.size}) must be a multiple of patch_size")
        if {len(self.mean), len(self.std)} != {self.channels}:
            problems.append(f"mean and std need one value for each of {self.channels} channels")
        if problems:
            raise ValueError("; ".join(problems))
        return self


_NOT_PLAIN = ("quantization_config", "auto_map")  # rounded weights, and code of strangers
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


class OriginalCode(BaseModel):
    """From what a model is built whose blocks are those of transformers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[str, Field(pattern=r"^\d+\.\d+")]  # transformers' own
    config: dict[str, Any]  # `config.json` of the original

    @field_validator("config")
    @classmethod
    def _is_plain(cls, given: dict[str, Any]) -> dict[str, Any]:
        if refused := [name for name in _NOT_PLAIN if given.get(name)]:
            raise ValueError(f"{' and '.join(refused)} is not supported")
        try:
            json.dumps(given, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                "numbers that are not finite (NaN, Infinity) are no options"
            ) from error
        for name in _LAYER_COUNTS:  # transformers makes lists as long
            if name in given and given[name] not in range(1, MAX_LAYERS + 1):
                said = f"{name} is {shortened(given[name])}"
                raise ValueError(f"{said}; supported: 1 to {MAX_LAYERS:,}")
        return given
