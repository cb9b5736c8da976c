"""The configuration of a model: its sizes, and its options in groups."""

from __future__ import annotations

from exporter.models.config.groups import (
    AttentionConfig,
    FeedForwardConfig,
    HeadConfig,
    ImageConfig,
    OriginalCode,
    PositionConfig,
    PositiveFloat,
    PositiveInt,
    Probability,
    RotaryScaling,
)
from exporter.models.config.model import TransformerConfig

__all__ = [
    "AttentionConfig",
    "FeedForwardConfig",
    "HeadConfig",
    "ImageConfig",
    "OriginalCode",
    "PositionConfig",
    "PositiveFloat",
    "PositiveInt",
    "Probability",
    "RotaryScaling",
    "TransformerConfig",
]
