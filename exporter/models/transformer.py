"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017), and its decoder alone."""

from __future__ import annotations

from torch import Tensor, nn

from exporter.models.config import TransformerConfig
from exporter.models.embeddings import Embeddings, make_token_embedding
from exporter.models.layers import Decoder, Encoder


class EncoderDecoder(nn.Module):
    """Reads a source sequence and writes a target sequence.

    B sentences, S source tokens, T target tokens, D = d_model, V = vocab_size.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        source = make_token_embedding(config, config.source_vocab_size or config.vocab_size)
        self.source_embeddings = Embeddings(
            config, config.max_source_len, source, uncounted=config.uncounted_token_id
        )
        self.encoder = Encoder(config)
        shared = self.source_embeddings.token if config.share_embeddings else None
        self.decoder = Decoder(config, shared)

    def forward(
        self, source_ids: Tensor, target_ids: Tensor, source_mask: Tensor | None = None
    ) -> Tensor:
        """Return the logits (B, T, V) of the token after each target token.

        source_ids int64 (B, S); target_ids int64 (B, T), beginning with bos_token_id and padded
        on the right; source_mask bool (B, S), True = real token.
        """
        return self.decode(target_ids, self.encode(source_ids, source_mask), source_mask)

    def encode(self, source_ids: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Return the memory (B, S, D) of the source."""
        memory: Tensor = self.encoder(self.source_embeddings(source_ids), source_mask)
        return memory

    def decode(
        self, target_ids: Tensor, memory: Tensor, source_mask: Tensor | None = None
    ) -> Tensor:
        """Return the logits (B, T, V) of the whole target."""
        logits: Tensor = self.decoder(target_ids, memory, source_mask)
        return logits


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
