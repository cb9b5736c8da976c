"""How rotary positions are stretched beyond the length that a model was first trained on."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from exporter.models.config.sizes import Options, PositiveFloat, PositiveInt

Factor = Annotated[float, Field(ge=1)]


class RotaryScaling(Options):
    """How Llama 3.1 does it.

    Waves longer than original_max_len / low_freq_factor are slowed down by `factor`, those shorter
    than original_max_len / high_freq_factor are left as they are, and those between are blended.
    """

    kind: Literal["llama3"]
    factor: Factor
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_len: PositiveInt

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor "
                f"({self.low_freq_factor})"
            )
        return self


class LinearScaling(Options):
    """All waves are slowed down by `factor`."""

    kind: Literal["linear"]
    factor: Factor


class YarnScaling(Options):
    """YaRN (Peng et al. 2023): waves are slowed down the more, the fewer turns they make.

    Those with more than `beta_fast` turns in the original length are left as they are, those with
    less than `beta_slow` are slowed down by `factor`. Scores grow by `attention_factor` squared.
    """

    kind: Literal["yarn"]
    factor: Factor
    original_max_len: PositiveInt
    attention_factor: PositiveFloat
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True  # the bounds are at whole numbers of a head


class LongScaling(Options):
    """LongRoPE (Ding et al. 2024): every wave is slowed down by a factor of its own."""

    kind: Literal["long"]
    factors: tuple[PositiveFloat, ...]
    attention_factor: PositiveFloat


AnyScaling = Annotated[
    RotaryScaling | LinearScaling | YarnScaling | LongScaling, Field(discriminator="kind")
]
