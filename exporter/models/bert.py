"""BERT: an encoder with a pooler on its first token and a classification head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exporter.models.config import TransformerConfig
from exporter.models.embeddings import Embeddings
from exporter.models.layers import Encoder, EncoderOutput, make_linear


class Bert(nn.Module):
    """Classifies a text, or a pair of texts told apart by token types."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config, config.max_source_len)
        self.encoder = Encoder(config)
        self.pooler = make_linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = make_linear(config.d_model, len(config.labels))

    def forward(
        self, input_ids: Tensor, mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> EncoderOutput:
        """Return logits (B, num_labels) and the pooled vector (B, d_model).

        input_ids, token_type_ids int64 (B, S); mask bool (B, S), True = real token.
        """
        hidden = self.encoder(self.embeddings(input_ids, token_type_ids=token_type_ids), mask)
        pooled = torch.tanh(self.pooler(hidden[:, 0]))  # (B, d_model)
        return EncoderOutput(self.classifier(self.dropout(pooled)), pooled)
