"""A sequence labeller: an encoder that gives every token a label."""

from __future__ import annotations

from torch import Tensor, nn

from exporter.models.config import TransformerConfig
from exporter.models.embeddings import Embeddings
from exporter.models.heads import make_classifier, make_pooler, mean_of
from exporter.models.layers import Encoder, EncoderOutput


class Labeller(nn.Module):
    """Chooses among the labels for each token of a text."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(
            config, config.max_source_len, uncounted=config.uncounted_token_id
        )
        self.encoder = Encoder(config)
        self.pooler = make_pooler(config)
        self.dropout = nn.Dropout(config.dropout)
        classifier = make_classifier(config)
        assert classifier is not None, "TransformerConfig demands labels of a labeller"
        self.classifier = classifier

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> EncoderOutput:
        """Return logits (B, S, num_labels) and the mean vector of the real tokens (B, d_model).

        input_ids int64 (B, S); mask bool (B, S), True = real token.
        """
        hidden = self.encoder(self.embeddings(input_ids), mask)  # (B, S, d_model)
        logits = self.classifier(self.dropout(self.pooler(hidden)))
        return EncoderOutput(logits, mean_of(hidden, mask))
