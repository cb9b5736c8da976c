"""BERT: an encoder that gives a text one vector, and labels the text or each of its tokens."""

from __future__ import annotations

from torch import Tensor, nn

from exporter.models.config import TransformerConfig
from exporter.models.embeddings import Embeddings
from exporter.models.heads import make_classifier, make_pooler, mean_of, pool, to_unit_length
from exporter.models.layers import Encoder, EncoderOutput


class Bert(nn.Module):
    """Classifies a text, or a pair of texts told apart by token types; without labels, embeds it.

    Poolers: tanh of the first token (BERT, RoBERTa), ReLU (DistilBERT), GELU and a norm
    (ModernBERT); for embeddings none or a dense layer, of the first token, the mean or the maximum.
    A labeller chooses among the labels for each token.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(
            config, config.max_source_len, uncounted=config.uncounted_token_id
        )
        self.encoder = Encoder(config)
        self.pooler = make_pooler(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = make_classifier(config)

    def forward(
        self, input_ids: Tensor, mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> EncoderOutput:
        """Return logits (B, num_labels), if there are labels, and the vector (B, head_dim).

        A labeller returns logits (B, S, num_labels) of each token, and the mean vector of the real
        ones (B, d_model).
        input_ids, token_type_ids int64 (B, S); mask bool (B, S), True = real token.
        """
        hidden = self.encoder(self.embeddings(input_ids, token_type_ids=token_type_ids), mask)
        head = self.config.head
        read = hidden if head.each_token else pool(hidden, mask, head.pooling)
        pooled: Tensor = self.pooler(read)
        logits = None if self.classifier is None else self.classifier(self.dropout(pooled))
        vector = mean_of(hidden, mask) if head.each_token else pooled
        return EncoderOutput(logits, to_unit_length(vector) if head.normalize else vector)
