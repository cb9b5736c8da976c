"""Options of positions."""

from __future__ import annotations

from typing import Literal

from exporter.models.config.sizes import Length, Options, PositiveFloat, PositiveInt


class RotaryScaling(Options):
    """How rotary positions turn where texts may be longer than those of the first training."""

    frequencies: tuple[PositiveFloat, ...]  # the angle from one place to the next, of each wave
    attention_factor: PositiveFloat = 1.0  # of cosines and sines: scores grow by its square
    original_max_len: PositiveInt | None = None  # tokens of the texts of the first training


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
