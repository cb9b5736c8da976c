"""How positions turn, as transformers computes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from exporter.models.config import PositiveInt, RotaryScaling


class Rope(BaseModel):
    """One of the `rope_parameters` of a configuration; transformers reads the other fields."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
    rope_theta: float
    partial_rotary_factor: float = 1.0
    factor: Annotated[float, Field(ge=1)] | None = None
    original_max_position_embeddings: PositiveInt | None = None

    def scaling(self, config: Any, length: int | None = None) -> RotaryScaling | None:
        """Return how all layers turn, or those without a window; None if the base says it.

        longrope turns texts of a `length` above its first otherwise. dynamic is as default up to
        the length of the model, which is the longest here.
        """
        if self.rope_type in ("default", "dynamic"):
            return None
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        layer_type = None if "rope_type" in config.rope_parameters else "full_attention"
        try:
            frequencies, factor = ROPE_INIT_FUNCTIONS[self.rope_type](
                config, None, length, layer_type=layer_type
            )
        except Exception as error:
            raise ValueError(f"its rope_parameters cannot be: {error}") from error
        first_len, is_longrope = self.original_max_position_embeddings, self.rope_type == "longrope"
        return RotaryScaling(
            frequencies=tuple(frequencies.tolist()),
            attention_factor=factor,
            original_max_len=None if is_longrope else first_len,
            least_len=1 + (first_len or 0) if is_longrope and length else 1,
        )
