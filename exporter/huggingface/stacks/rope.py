"""How positions turn, as transformers writes it."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from exporter.models.config import (
    AnyScaling,
    LinearScaling,
    LongScaling,
    PositiveInt,
    RotaryScaling,
    YarnScaling,
)


class Rope(BaseModel):
    """One of the `rope_parameters` of a configuration; other types have fields besides.

    dynamic: as default up to the length of the model, which is the longest here.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
    rope_theta: float
    partial_rotary_factor: float = 1.0
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

    def scaling(self, max_len: int, *, is_long: bool = False) -> AnyScaling | None:
        """Return the scaling in our terms for a model of `max_len` positions, None for none.

        longrope has factors for texts up to its first length, and for those of a model that
        `is_long`.
        """
        original = self.original_max_position_embeddings or max_len
        factor = max_len / original if self.factor is None else self.factor
        given: dict[str, Any] = {"factor": factor, "original_max_len": original}
        match self.rope_type:
            case "linear":
                return LinearScaling(kind="linear", factor=factor)
            case "llama3":
                given |= {"kind": "llama3", "low_freq_factor": self.low_freq_factor}
                given |= {"high_freq_factor": self.high_freq_factor}
                return RotaryScaling.model_validate(given)
            case "yarn":
                given |= {"beta_fast": self.beta_fast or 32.0, "beta_slow": self.beta_slow or 1.0}
                given |= {"kind": "yarn", "truncate": self.truncate}
                given |= {"attention_factor": self.attention_factor or self._growth(factor)}
                return YarnScaling.model_validate(given)
            case "longrope":
                grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
                given = {"factors": self.long_factor if is_long else self.short_factor}
                given |= {"kind": "long", "attention_factor": self.attention_factor or grown}
                return LongScaling.model_validate(given)
            case _:
                return None

    def _growth(self, factor: float) -> float:
        """Return by how much scores grow with YaRN."""

        def size(scale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return size(self.mscale) / size(self.mscale_all_dim)
        return size(1.0)
