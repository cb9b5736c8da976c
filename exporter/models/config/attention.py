"""Options of attention (section 3.2 of Vaswani et al. 2017)."""

from __future__ import annotations

from typing import Literal

from exporter.models.config.sizes import Options, PositiveFloat, PositiveInt, Probability


class AttentionConfig(Options):
    """How queries score keys, and what becomes of the values."""

    bias: bool = True
    output: bool = True  # W_O; False: the values of a single head are the output
    output_bias: bool | None = None  # None: as bias
    score: Literal["dot", "additive"] = "dot"  # additive: encoders
    normalizer: Literal["softmax", "relu"] = "softmax"  # relu: encoders
    scale: PositiveFloat | None = None  # None: 1 / sqrt(key_dim)
    softcap: PositiveFloat | None = None  # c * tanh(score / c)
    qk_norm: bool = False  # mean-square norms of every query and key
    # A query sees so many keys, the one at its own place among them: before it, in an encoder on
    # either side; None: all
    window: PositiveInt | None = None
    windowed_layers: tuple[int, ...] | None = None  # None: all
    dropout: Probability = 0.0

    def layer_window(self, layer: int) -> int | None:
        """Return how many keys a query of this layer sees, None for all before it."""
        is_windowed = self.windowed_layers is None or layer in self.windowed_layers
        return self.window if is_windowed else None
