"""GPT: a decoder alone, predicting the next token of a text."""

from __future__ import annotations

from torch import Tensor, nn

from exporter.models.config import TransformerConfig
from exporter.models.layers import Decoder


class GPT(nn.Module):
    """A decoder without cross-attention; its output head has no bias (unless configured)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits (B, T, vocab_size) of the token after each of int64 ids (B, T).

        Attention is causal, so padding on the right needs no mask.
        """
        logits: Tensor = self.decoder(input_ids)
        return logits

    def encode(self, source_ids: Tensor, source_mask: Tensor | None = None) -> None:
        """Return None: a model without encoder has no source."""
