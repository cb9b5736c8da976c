"""Sizes of models, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from exporter.models.config import ImageConfig

_IMAGE = ImageConfig(size=32, patch_size=4)

SizeName = Literal["tiny", "base"]


@dataclass(frozen=True)
class Size:
    """How large a model is, and how it is trained."""

    d_model: int
    num_heads: int
    d_ff: int
    num_encoder_layers: int
    num_decoder_layers: int  # behind an encoder
    vocab_size: int  # at most
    steps: int
    batch_tokens: int
    peak_learning_rate: float
    writing_rate: float  # likewise, of an encoder-decoder
    max_len: int = 256  # tokens of a text, its end included; what is longer to classify is cut
    dropout: float = 0.1
    image: ImageConfig = _IMAGE

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of a TransformerConfig that every architecture has."""
        names = ("d_model", "num_heads", "d_ff", "num_encoder_layers", "dropout")
        return {name: getattr(self, name) for name in names}


SIZES: Mapping[SizeName, Size] = MappingProxyType(
    {
        # Learns on two cores of a CPU in minutes: small batches bring it further in a time.
        "tiny": Size(128, 4, 512, 3, 3, 4000, 4000, 1024, 1.5e-3, 3e-3),
        # "Attention Is All You Need", table 3; a GPU's work where there is much data.
        "base": Size(
            *(512, 8, 2048, 6, 6, 16_000, 30_000, 8192, 7e-4, 7e-4),
            image=ImageConfig(size=224, patch_size=16),
        ),
    }
)
