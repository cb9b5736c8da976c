"""Models of which some layers see all tokens, and the others a window of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from exporter.huggingface.family import OriginalConfig
from exporter.huggingface.rope import LayerType, RopeParameters
from exporter.models.config import PositiveInt


def sliding(layer_types: Sequence[LayerType]) -> tuple[int, ...]:
    """Return which layers have a window."""
    return tuple(i for i, kind in enumerate(layer_types) if kind == "sliding_attention")


def check_layer_types(layer_types: Sequence[LayerType] | None, num_layers: int) -> None:
    """Refuse kinds that are not those of all layers."""
    if layer_types is not None and len(layer_types) != num_layers:
        raise ValueError(
            f"layer_types names {len(layer_types)} layers, and num_hidden_layers is {num_layers}"
        )


class LayeredConfig(OriginalConfig):
    """`config.json` of such a model; older files have the pattern of its layers instead."""

    first_full: ClassVar[int] = 0  # the number of a layer that sees all

    num_hidden_layers: PositiveInt
    layer_types: tuple[LayerType, ...] | None = None
    sliding_window_pattern: PositiveInt  # one of so many layers sees all

    @model_validator(mode="after")
    def _check_layer_types(self) -> Self:
        check_layer_types(self.layer_types, self.num_hidden_layers)
        return self

    @property
    def types(self) -> tuple[LayerType, ...]:
        """Return the kind of every layer."""
        places = range(-self.first_full, self.num_hidden_layers - self.first_full)
        return self.layer_types or tuple(
            "sliding_attention" if i % self.sliding_window_pattern else "full_attention"
            for i in places
        )


class LocalRope(RopeParameters):
    """How positions turn in layers with a window: nothing is stretched."""

    rope_type: Literal["default"] = "default"


class LayeredRope(RopeParameters):
    """How positions turn in each kind of layer; in older files only for those that see all."""

    by_layer: ClassVar[bool] = True

    full_attention: RopeParameters | None = None
    sliding_attention: LocalRope | None = None


class LayeredRopeConfig(LayeredConfig):
    """`config.json` of such a model whose positions turn in each kind of layer in its own way."""

    rope_theta: float
    rope_local_base_freq: float = 10_000.0
    rope_scaling: RopeParameters | None = None
    rope_parameters: LayeredRope | None = None

    @property
    def rope(self) -> RopeParameters:
        """Return how positions turn in layers that see all."""
        layered = self.rope_parameters and self.rope_parameters.full_attention
        return layered or self.rope_scaling or RopeParameters()

    def local_options(self, window: int) -> dict[str, Any]:
        """Return the options of the other layers, which see so many tokens."""
        layered = self.rope_parameters and self.rope_parameters.sliding_attention
        base = (layered and layered.rope_theta) or self.rope_local_base_freq
        layers = sliding(self.types)
        options = {"window": window, "windowed_layers": layers, "local_rotary_base": base}
        return options if layers else {}
