"""The configuration of a model: its sizes, and its options in groups, a file each."""

from __future__ import annotations

from exporter.models.config.attention import AttentionConfig
from exporter.models.config.feed_forward import FeedForwardConfig
from exporter.models.config.head import HeadConfig
from exporter.models.config.image import ImageConfig
from exporter.models.config.model import TransformerConfig
from exporter.models.config.original_code import OriginalCode
from exporter.models.config.positions import PositionConfig, RotaryScaling
from exporter.models.config.sizes import PositiveFloat, PositiveInt, Probability

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
