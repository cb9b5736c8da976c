"""What a converter gives: the configuration of a model, and where its weights are in the source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from exporter.models.config import TransformerConfig

# Names of Hugging Face, and ours.
Activation = Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish"]
ACTIVATIONS: Mapping[Activation, Literal["relu", "gelu", "gelu_tanh", "silu"]] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class SourceConfig(BaseModel):
    """`config.json` of a source, as far as any family has it; a converter adds its own fields.

    A field of one allowed value is an option that must not be set otherwise. Fields that are not
    named do not change what the model computes.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    quantization_config: None = None


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that begin, end and fill sequences; None: the source names none."""

    eos: int | None
    pad: int | None
    decoder_start: int | None


@dataclass(frozen=True)
class SourceWeight:
    """Where one of our weights is in a source, and how it is stored there."""

    names: tuple[str, ...]  # the first that is there; any other one must be a copy of it
    transposed: bool = False  # stored [in, out]
    part: int = 0  # which of `num_parts`, packed along the outputs
    num_parts: int = 1
    row: bool = False  # a vector stored as [1, n]
    optional: bool = False  # zeros where the source has none

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the source has to have for our weight of `shape`."""
        stored = (shape[0] * self.num_parts, *shape[1:])
        if self.transposed:
            stored = stored[::-1]
        return (1, *stored) if self.row else stored

    def extract(self, stored: Tensor) -> Tensor:
        """Return our weight from the source's tensor, in float32."""
        tensor = stored[0] if self.row else stored
        if self.transposed:
            tensor = tensor.T
        return tensor.chunk(self.num_parts)[self.part].float()


@dataclass(frozen=True)
class Conversion:
    """A model of the source, described in our terms."""

    config: TransformerConfig
    weights: Mapping[str, SourceWeight]  # by our name, tied weights once
    ignored: re.Pattern[str]  # names of tensors that say nothing: masks, computed tables


def linear(
    target: str, *names: str, transposed: bool = False, bias: bool = True
) -> dict[str, SourceWeight]:
    """Return weight and bias, if any, of a linear layer, `names` being those of the same one."""
    found = {f"{target}.weight": SourceWeight(_all(names, "weight"), transposed=transposed)}
    if bias:
        found[f"{target}.bias"] = SourceWeight(_all(names, "bias"))
    return found


def token_and_output(token: tuple[str, ...], *, tied: bool) -> dict[str, SourceWeight]:
    """Return the embedding of tokens and the output of a language model, one weight if tied."""
    embedding, output = "decoder.embeddings.token.weight", ("lm_head.weight",)
    if tied:
        return {embedding: SourceWeight((*token, *output))}
    return {embedding: SourceWeight(token), "decoder.output.weight": SourceWeight(output)}


def norm(target: str, *names: str, bias: bool = True) -> dict[str, SourceWeight]:
    """Return weight and bias, if any, of a norm, `names` being those of the same one."""
    return linear(target, *names, bias=bias)


def _all(names: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(f"{name}.{kind}" for name in names)
