"""A sequence labeller: an encoder that gives every token a label."""

from __future__ import annotations

from torch import Tensor, nn

from exporter.models.config import TransformerConfig
from exporter.models.embeddings import Embeddings
from exporter.models.layers import Encoder, EncoderOutput, make_linear


class Labeller(nn.Module):
    """Chooses among the labels for each token of a text."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config, config.max_source_len)
        self.encoder = Encoder(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = make_linear(config.d_model, len(config.labels))

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> EncoderOutput:
        """Return logits (B, S, num_labels) and the mean vector of the real tokens (B, d_model).

        input_ids int64 (B, S); mask bool (B, S), True = real token.
        """
        hidden = self.encoder(self.embeddings(input_ids), mask)  # (B, S, d_model)
        return EncoderOutput(self.classifier(self.dropout(hidden)), _mean(hidden, mask))


def _mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return hidden.mean(dim=1)
    # A product, not a sum over the axis: onnxruntime sums in an order that depends on the batch.
    weights = mask.unsqueeze(1).to(hidden.dtype)  # (B, 1, S)
    total = (weights @ hidden).squeeze(1)  # (B, d_model)
    return total / weights.sum(dim=2).clamp(min=1)
