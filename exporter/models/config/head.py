"""Options of what encoders make of the last layer."""

from __future__ import annotations

from typing import Literal

from engine.package.manifest import LabelScores
from exporter.models.config.sizes import Options, Width

Pooler = Literal["tanh", "relu", "gelu", "gelu_tanh", "silu", "linear", "none"]


class HeadConfig(Options):
    """From vectors of tokens to the one of a text, and to labels."""

    each_token: bool = False  # every token has a label, not the text
    pooling: Literal["first", "mean", "max"] = "first"  # the vector of a text
    # A dense layer behind it, or on each token, by its activation; None: tanh for a text
    pooler: Pooler | None = None
    pooler_bias: bool = True
    pooler_norm: bool = False  # behind the activation
    embedding_dim: Width | None = None  # the pooler's width; None: d_model
    normalize: bool = False  # vectors of length 1
    # The function from logits to probabilities: one label of many, or each by itself; none: logits
    label_scores: LabelScores = "softmax"
