"""Options of positions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from exporter.models.config.attention import AttentionOptions
from exporter.models.config.rotary_scaling import AnyScaling, LongScaling
from exporter.models.config.sizes import (
    WITH_DECODER,
    Length,
    PositiveFloat,
    PositiveInt,
    unless,
)
from exporter.models.config.vocabulary import VocabularyOptions

_MAX_TABLE = 2**28  # numbers in a table of positions that is computed, not learned
ROTARY_HEAD_DIM_MULTIPLE = 16  # the attention kernels turn heads of no other widths


class PositionOptions(VocabularyOptions, AttentionOptions):
    """How a model tells places apart."""

    # sinusoidal: sines and cosines in turn, as in the paper; sinusoidal_halves: all sines, then
    # all cosines (Marian); sinusoidal_tensor2tensor: likewise, and the last wave is the slowest of
    # the paper (M2M); rotary: queries and keys are turned, nothing is added; relative:
    # scores are biased by buckets of distances, nothing is added (T5)
    positions: Literal[
        "sinusoidal",
        "sinusoidal_halves",
        "sinusoidal_tensor2tensor",
        "learned",
        "rotary",
        "relative",
    ] = "sinusoidal"
    position_offset: Annotated[Length, unless(0)] = 0  # the number of the first sinusoidal place
    relative_buckets: Annotated[PositiveInt, unless(32)] = 32
    relative_max_distance: Annotated[PositiveInt, unless(128)] = 128  # one bucket from here on
    rotary_base: Annotated[float, Field(gt=0)] = 10000.0
    rotary_scaling: AnyScaling | None = None
    rotary_dim: Annotated[PositiveInt | None, unless(None)] = None  # of a head turn; None: all
    # The base in layers that have a window, where nothing is stretched; None: as elsewhere
    local_rotary_base: Annotated[PositiveFloat | None, unless(None)] = None

    @property
    def position_problems(self) -> list[str]:
        """Say what of the positions does not go together."""
        if self.position_offset and not self.positions.startswith("sinusoidal"):
            return [f"position_offset needs sinusoidal positions, got {self.positions}"]
        if self.positions == "rotary":
            return self._rotary_problems()
        if self.positions == "relative":
            return self._relative_problems()
        given = {
            "rotary_scaling": self.rotary_scaling,
            "rotary_dim": self.rotary_dim,
            "local_rotary_base": self.local_rotary_base,
        }
        return [
            f"{name} needs rotary positions, got {self.positions}"
            for name, value in given.items()
            if value is not None
        ]

    def _rotary_problems(self) -> list[str]:
        found = []
        if self.family in ("encoder-decoder", "vit"):
            found.append(f"rotary positions are for gpt, bert and labeller, got {self.family}")
        # The two halves of a head turn together, so a head cannot be widened for the kernels.
        key_dim, value_dim = self.head_key_dim, self.head_value_dim
        if self.family in WITH_DECODER and (
            key_dim % ROTARY_HEAD_DIM_MULTIPLE or value_dim > key_dim
        ):
            found.append(
                f"rotary positions need heads whose key_dim is a multiple of "
                f"{ROTARY_HEAD_DIM_MULTIPLE} and at least value_dim, got {key_dim} and {value_dim}"
            )
        turned = self.turned_dim
        if turned % 2 or turned > key_dim:
            found.append(f"rotary_dim ({turned}) must be even and at most key_dim ({key_dim})")
        scaling = self.rotary_scaling
        if isinstance(scaling, LongScaling) and len(scaling.factors) != turned // 2:
            found.append(
                f"rotary_scaling needs a factor for each of {turned // 2} waves, "
                f"got {len(scaling.factors)}"
            )
        if self.local_rotary_base is not None and self.window is None:
            found.append("local_rotary_base needs window")
        return found

    @property
    def turned_dim(self) -> int:
        """How many numbers of a head turn: the first of each half of it."""
        return self.rotary_dim or self.head_key_dim

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
        length = self.position_offset + max(self.max_source_len, self.max_target_len, num_patches)
        if length * width <= _MAX_TABLE:
            return []
        return [
            f"{length:,} {self.positions} positions of {width:,} numbers are more than "
            f"{_MAX_TABLE:,} numbers; lower max_source_len or max_target_len"
        ]
