"""Options of positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from exporter.models.config.attention import AttentionOptions
from exporter.models.config.checked import Check, Checks
from exporter.models.config.rotary_scaling import AnyScaling, LongScaling
from exporter.models.config.sizes import WITH_DECODER, Length, PositiveFloat, PositiveInt
from exporter.models.config.vocabulary import VocabularyOptions

_MAX_TABLE = 2**28  # numbers in a table of positions that is computed, not learned
_ROTARY_ONLY = ("rotary_scaling", "rotary_dim", "local_rotary_base")
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
    position_offset: Length = 0  # the number of the first sinusoidal place
    # Numbers that sinusoidal places are rounded to, where they were kept so in an original
    position_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    relative_buckets: PositiveInt = 32
    relative_max_distance: PositiveInt = 128  # one bucket from here on
    rotary_base: Annotated[float, Field(gt=0)] = 10000.0
    rotary_scaling: AnyScaling | None = None
    rotary_dim: PositiveInt | None = None  # the part of a head that turns; None: all
    # The base in layers that have a window, where nothing is stretched; None: as elsewhere
    local_rotary_base: PositiveFloat | None = None

    @property
    def position_checks(self) -> Checks:
        """The rules between options of positions."""
        rotary: Checks = (
            self._check_rotary_family,
            self._check_rotary_width,
            self._check_turned,
            self._check_factors,
            self._check_local_base,
        )
        relative: Checks = (self._check_relative_family, self._check_buckets)
        return (
            self._check_sinusoidal_only,
            *(partial(self._of_kind, "rotary", check) for check in rotary),
            *(partial(self._of_kind, "relative", check) for check in relative),
            *(partial(self._check_rotary_only, name) for name in _ROTARY_ONLY),
        )

    def _of_kind(self, positions: str, check: Check) -> Iterable[str]:
        return check() if self.positions == positions else ()

    def _check_sinusoidal_only(self) -> Iterator[str]:
        is_changed = {
            "position_offset": self.position_offset != 0,
            "position_dtype": self.position_dtype != "float32",
        }
        for name, changed in is_changed.items():
            if changed and not self.positions.startswith("sinusoidal"):
                yield f"{name} needs sinusoidal positions, got {self.positions}"

    def _check_rotary_only(self, name: str) -> Iterator[str]:
        if getattr(self, name) is not None and self.positions not in ("rotary", "relative"):
            yield f"{name} needs rotary positions, got {self.positions}"

    def _check_rotary_family(self) -> Iterator[str]:
        if self.family in ("encoder-decoder", "vit"):
            yield f"rotary positions are for gpt, bert and labeller, got {self.family}"

    def _check_rotary_width(self) -> Iterator[str]:
        # The two halves of a head turn together, so a head cannot be widened for the kernels.
        key_dim, value_dim = self.head_key_dim, self.head_value_dim
        if self.family in WITH_DECODER and (
            key_dim % ROTARY_HEAD_DIM_MULTIPLE or value_dim > key_dim
        ):
            yield (
                f"rotary positions need heads whose key_dim is a multiple of "
                f"{ROTARY_HEAD_DIM_MULTIPLE} and at least value_dim, got {key_dim} and {value_dim}"
            )

    def _check_turned(self) -> Iterator[str]:
        turned, key_dim = self.turned_dim, self.head_key_dim
        if turned % 2 or turned > key_dim:
            yield f"rotary_dim ({turned}) must be even and at most key_dim ({key_dim})"

    def _check_factors(self) -> Iterator[str]:
        scaling, turned = self.rotary_scaling, self.turned_dim
        if isinstance(scaling, LongScaling) and len(scaling.factors) != turned // 2:
            yield (
                f"rotary_scaling needs a factor for each of {turned // 2} waves, "
                f"got {len(scaling.factors)}"
            )

    def _check_local_base(self) -> Iterator[str]:
        if self.local_rotary_base is not None and self.window is None:
            yield "local_rotary_base needs window"

    @property
    def turned_dim(self) -> int:
        """How many numbers of a head turn: the first of each half of it."""
        return self.rotary_dim or self.head_key_dim

    def _check_relative_family(self) -> Iterator[str]:
        if self.family != "encoder-decoder":
            yield f"relative positions are for encoder-decoder, got {self.family}"

    def _check_buckets(self) -> Iterator[str]:
        if self.relative_buckets % 4 or self.relative_max_distance <= self.relative_buckets // 2:
            yield (
                "relative positions need relative_buckets that are a multiple of 4 and a "
                "relative_max_distance above the half of them, got "
                f"{self.relative_buckets} and {self.relative_max_distance}"
            )

    def table_problems(self, num_patches: int) -> Iterator[str]:
        """Bound what is computed from the options alone; no weight could tell it is too large."""
        if self.positions == "learned":
            return
        widths = {"rotary": self.head_key_dim, "relative": self.num_heads}
        width = widths.get(self.positions, self.d_model)
        length = self.position_offset + max(self.max_source_len, self.max_target_len, num_patches)
        if length * width > _MAX_TABLE:
            yield (
                f"{length:,} {self.positions} positions of {width:,} numbers are more than "
                f"{_MAX_TABLE:,} numbers; lower max_source_len or max_target_len"
            )
