"""Options of the feed-forward layers."""

from __future__ import annotations

from typing import Literal

from exporter.models.config.sizes import SizeOptions


class FeedForwardOptions(SizeOptions):
    """The two products, and the activation between them."""

    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    gated_feed_forward: bool = False  # down(activation(gate(x)) * up(x)), Shazeer 2020
    feed_forward_bias: bool = True
    # In a package in float16 the second product stays in float32, and what it is added to: T5's
    # values there pass the largest number of float16 on some texts.
    float32_feed_forward_output: bool = False
