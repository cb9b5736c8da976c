"""Options of dropout."""

from __future__ import annotations

from exporter.models.config.sizes import Probability, SizeOptions


class DropoutOptions(SizeOptions):
    """How much is left out in training."""

    dropout: Probability = 0.1  # of sub-layer outputs and embeddings
    attention_dropout: Probability = 0.0  # of attention weights
    feed_forward_dropout: Probability = 0.0  # of the inner layer, behind its activation
