"""The configuration of a model: its options in groups, a file each."""

from __future__ import annotations

from exporter.models.config.image import ImageConfig
from exporter.models.config.model import OriginalCode, TransformerConfig
from exporter.models.config.rotary_scaling import (
    AnyScaling,
    LinearScaling,
    LongScaling,
    RotaryScaling,
    YarnScaling,
)
from exporter.models.config.sizes import Family, PositiveFloat, PositiveInt, Probability

__all__ = [
    "AnyScaling",
    "Family",
    "ImageConfig",
    "LinearScaling",
    "LongScaling",
    "OriginalCode",
    "PositiveFloat",
    "PositiveInt",
    "Probability",
    "RotaryScaling",
    "TransformerConfig",
    "YarnScaling",
]
