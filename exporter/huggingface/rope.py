"""How positions turn, as sources write it."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from exporter.models.config import PositiveInt, RotaryScaling

_SCALING = {  # the fields of llama3, and our names of them
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_len",
}


class RopeParameters(BaseModel):
    """How positions turn; fields that other types have are those that are not named here."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    rope_type: Literal["default", "llama3"] = "default"
    rope_theta: float | None = None
    partial_rotary_factor: Literal[1] = 1
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and "type" in given:
            return {"rope_type": given["type"], **given}
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        lacking = [name for name in _SCALING if getattr(self, name) is None]
        if self.rope_type == "llama3" and lacking:
            raise ValueError(f"rope_type llama3 needs {', '.join(lacking)}")
        return self

    def scaling(self) -> RotaryScaling | None:
        """Return the scaling in our terms, None for none."""
        if self.rope_type == "default":
            return None
        return RotaryScaling.model_validate(
            {ours: getattr(self, theirs) for theirs, ours in _SCALING.items()}
        )
