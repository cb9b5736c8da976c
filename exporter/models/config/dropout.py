"""Options of dropout."""

from __future__ import annotations

from exporter.models.config.sizes import Probability, SizeOptions


class DropoutOptions(SizeOptions):
    """How much is left out in training."""

    dropout: Probability = 0.1  # sub-layer outputs and embeddings
    attention_dropout: Probability = 0.0
    feed_forward_dropout: Probability = 0.0  # the inner layer, behind its activation
