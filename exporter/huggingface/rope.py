"""How positions turn, as originals write it."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from exporter.models.config import (
    AnyScaling,
    LinearScaling,
    LongScaling,
    PositiveInt,
    RotaryScaling,
    YarnScaling,
)

LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES = frozenset(get_args(LayerType))

_NEEDED = {  # the fields that a type needs
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "longrope": ("short_factor", "long_factor"),
}


def check_one_of(scaling: RopeParameters | None, parameters: RopeParameters | None) -> None:
    """Refuse the older name beside the newer one: transformers drops what only the newer says."""
    if scaling is not None and parameters is not None and scaling != parameters:
        raise ValueError(
            "rope_scaling and rope_parameters are both given; write all into the latter"
        )


class RopeParameters(BaseModel):
    """How positions turn; fields that other types have are those that are not named here.

    dynamic: as default up to the length of the model, which is the longest here.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    by_layer: ClassVar[bool] = False  # each kind of layer may have parameters of its own

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    attention_factor: float | None = None
    original_max_position_embeddings: PositiveInt | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None  # longrope
    long_factor: tuple[float, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and not cls.by_layer and not LAYER_TYPES.isdisjoint(given):
            raise ValueError("this model turns the positions of all layers in one way")
        if isinstance(given, dict) and "type" in given:
            return {"rope_type": given["type"], **given}
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = _NEEDED.get(self.rope_type, ())
        lacking = [name for name in needed if getattr(self, name) is None]
        if lacking:
            raise ValueError(f"rope_type {self.rope_type} needs {', '.join(lacking)}")
        return self

    def scaling(
        self, max_len: int, original_max_len: int | None = None, *, is_long: bool = False
    ) -> AnyScaling | None:
        """Return the scaling in our terms for a model of `max_len` positions, None for none.

        `original_max_len` is of a config that has it beside these parameters; longrope has
        factors for texts up to that length, and for those of a model that `is_long`.
        """
        original = original_max_len or self.original_max_position_embeddings or max_len
        factor = max_len / original if self.factor is None else self.factor
        match self.rope_type:
            case "linear":
                return LinearScaling(kind="linear", factor=factor)
            case "llama3":
                return self._llama3(original)
            case "yarn":
                return self._yarn(factor, original)
            case "longrope":
                return self._long(
                    factor, original, self.long_factor if is_long else self.short_factor
                )
            case _:
                return None

    def _llama3(self, original: int) -> RotaryScaling:
        return RotaryScaling.model_validate(
            {
                "factor": self.factor,
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                "original_max_len": original,
            }
        )

    def _yarn(self, factor: float, original: int) -> YarnScaling:
        return YarnScaling(
            kind="yarn",
            factor=factor,
            original_max_len=original,
            attention_factor=self.attention_factor or self._yarn_attention(factor),
            beta_fast=self.beta_fast or 32.0,
            beta_slow=self.beta_slow or 1.0,
            truncate=self.truncate,
        )

    def _yarn_attention(self, factor: float) -> float:
        def size(scale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return size(self.mscale) / size(self.mscale_all_dim)
        return size(1.0)

    def _long(self, factor: float, original: int, factors: tuple[float, ...] | None) -> LongScaling:
        grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        assert factors is not None, "it was checked"
        return LongScaling(
            kind="long", factors=factors, attention_factor=self.attention_factor or grown
        )
