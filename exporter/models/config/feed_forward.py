"""Options of the feed-forward layers."""

from __future__ import annotations

from typing import Literal

from exporter.models.config.sizes import Options, Probability


class FeedForwardConfig(Options):
    """The two products, and the activation between them."""

    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    gated: bool = False  # down(activation(gate(x)) * up(x)), Shazeer 2020
    bias: bool = True
    # In a package in float16 the second product stays in float32, and what it is added to: T5's
    # values there pass the largest number of float16 on some texts.
    float32_output: bool = False
    dropout: Probability = 0.0  # the inner layer, behind its activation
