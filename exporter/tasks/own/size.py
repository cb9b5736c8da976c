"""Sizes of models, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

SizeName = Literal["tiny", "base"]


@dataclass(frozen=True)
class Size:
    """How large a model is, and how it is trained."""

    d_model: int
    num_heads: int
    d_ff: int
    num_layers: int  # of an encoder, and of a decoder
    vocab_size: int  # at most
    steps: int
    batch_tokens: int
    peak_learning_rate: float
    writing_rate: float  # likewise, of an encoder-decoder

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of a TransformerConfig that every family has."""
        return {"d_model": self.d_model, "num_heads": self.num_heads, "d_ff": self.d_ff}


SIZES: Mapping[SizeName, Size] = MappingProxyType(
    {
        # Learns on two cores of a CPU in minutes: small batches bring it further in a time.
        "tiny": Size(128, 4, 512, 3, 4000, 4000, 1024, 1.5e-3, 3e-3),
        # "Attention Is All You Need", table 3; a GPU's work where there is much data.
        "base": Size(512, 8, 2048, 6, 16_000, 30_000, 8192, 7e-4, 7e-4),
    }
)
