"""Options of positions."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from exporter.models.config.attention import AttentionOptions
from exporter.models.config.sizes import PositiveInt, unless
from exporter.models.config.vocabulary import VocabularyOptions

_MAX_TABLE = 2**28  # numbers in a table of positions that is computed, not learned
ROTARY_HEAD_DIM_MULTIPLE = 16  # the attention kernels turn heads of no other widths


class RotaryScaling(BaseModel):
    """How Llama 3.1 stretches rotary positions beyond the length that it was first trained on.

    Waves longer than original_max_len / low_freq_factor are slowed down by `factor`, those shorter
    than original_max_len / high_freq_factor are left as they are, and those between are blended.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    factor: Annotated[float, Field(ge=1)]
    low_freq_factor: Annotated[float, Field(gt=0)]
    high_freq_factor: Annotated[float, Field(gt=0)]
    original_max_len: PositiveInt

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor "
                f"({self.low_freq_factor})"
            )
        return self


class PositionOptions(VocabularyOptions, AttentionOptions):
    """How a model tells places apart."""

    # sinusoidal: sines and cosines in turn, as in the paper; sinusoidal_halves: all sines, then
    # all cosines (Marian); rotary: queries and keys are turned, nothing is added (gpt); relative:
    # scores are biased by buckets of distances, nothing is added (T5)
    positions: Literal["sinusoidal", "sinusoidal_halves", "learned", "rotary", "relative"] = (
        "sinusoidal"
    )
    relative_buckets: Annotated[PositiveInt, unless(32)] = 32
    relative_max_distance: Annotated[PositiveInt, unless(128)] = 128  # one bucket from here on
    rotary_base: Annotated[float, Field(gt=0)] = 10000.0
    rotary_scaling: RotaryScaling | None = None

    @property
    def position_problems(self) -> list[str]:
        """Say what of the positions does not go together."""
        if self.positions == "rotary":
            return self._rotary_problems()
        if self.positions == "relative":
            return self._relative_problems()
        if self.rotary_scaling is not None:
            return [f"rotary_scaling needs rotary positions, got {self.positions}"]
        return []

    def _rotary_problems(self) -> list[str]:
        found = []
        if self.family != "gpt":
            found.append(f"rotary positions are for gpt, got {self.family}")
        # The two halves of a head turn together, so a head cannot be widened for the kernels.
        key_dim, value_dim = self.head_key_dim, self.head_value_dim
        if key_dim % ROTARY_HEAD_DIM_MULTIPLE or value_dim > key_dim:
            found.append(
                f"rotary positions need heads whose key_dim is a multiple of "
                f"{ROTARY_HEAD_DIM_MULTIPLE} and at least value_dim, got {key_dim} and {value_dim}"
            )
        return found

    def _relative_problems(self) -> list[str]:
        found = []
        if self.family != "encoder-decoder":
            found.append(f"relative positions are for encoder-decoder, got {self.family}")
        if self.relative_buckets % 4 or self.relative_max_distance <= self.relative_buckets // 2:
            found.append(
                "relative positions need relative_buckets that are a multiple of 4 and a "
                "relative_max_distance above the half of them, got "
                f"{self.relative_buckets} and {self.relative_max_distance}"
            )
        return found

    def table_problems(self, num_patches: int) -> list[str]:
        """Bound what is computed from the options alone; no weight could tell it is too large."""
        if self.positions == "learned":
            return []
        widths = {"rotary": self.head_key_dim, "relative": self.num_heads}
        width = widths.get(self.positions, self.d_model)
        length = max(self.max_source_len, self.max_target_len, num_patches)
        if length * width <= _MAX_TABLE:
            return []
        return [
            f"{length:,} {self.positions} positions of {width:,} numbers are more than "
            f"{_MAX_TABLE:,} numbers; lower max_source_len or max_target_len"
        ]
