"""Sizes of a stack of layers, as `config.json` has them."""

from __future__ import annotations

from typing import Any

from exporter.huggingface.family import ACTIVATIONS, Activation, OriginalConfig
from exporter.models.config import PositiveInt, Probability


class StackConfig(OriginalConfig):
    """What layers of all families have; a family that calls it otherwise gives it an alias."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt | None = None  # None: four times as wide
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    hidden_act: Activation
    hidden_dropout_prob: Probability = 0.0
    attention_probs_dropout_prob: Probability = 0.0
    norm_eps: float = 1e-5

    @property
    def layer_options(self) -> dict[str, Any]:
        """Return the options of layers in our terms."""
        return {
            "d_model": self.hidden_size,
            "num_heads": self.num_attention_heads,
            "d_ff": self.intermediate_size or 4 * self.hidden_size,
            "activation": ACTIVATIONS[self.hidden_act],
            "norm_eps": self.norm_eps,
            "dropout": self.hidden_dropout_prob,
            "attention_dropout": self.attention_probs_dropout_prob,
        }
