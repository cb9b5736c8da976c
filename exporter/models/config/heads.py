"""Options of what one-pass families make of the last layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from engine.package.manifest import LabelScores
from exporter.models.config.checked import Checks
from exporter.models.config.sizes import SizeOptions, Width

Pooling = Literal["first", "mean", "max"]
Pooler = Literal["tanh", "relu", "gelu", "gelu_tanh", "silu", "linear", "none"]


class HeadOptions(SizeOptions):
    """From vectors of tokens to the one of a text, and to labels."""

    pooling: Pooling = "first"  # bert: the vector of a text
    # A dense layer behind it, of a labeller on every token, by its activation; None: tanh of bert
    pooler: Pooler | None = None
    pooler_bias: bool = True
    pooler_norm: bool = False  # behind the activation
    embedding_dim: Width | None = None  # the pooler's width; None: d_model
    normalize: bool = False  # vectors of length 1
    # The function from logits to probabilities: one label of many, or each by itself; none: logits
    label_scores: LabelScores = "softmax"

    @property
    def pooler_kind(self) -> Pooler:
        """The layer between the last layer and the classifier."""
        return self.pooler or ("tanh" if self.family == "bert" else "none")

    @property
    def head_dim(self) -> int:
        """Width of what the classifier reads, and of the vector of a text."""
        return self.embedding_dim or self.d_model

    @property
    def head_option_checks(self) -> Checks:
        """The rules between options of the head."""
        return self._check_pooler_width, self._check_pooler_family, self._check_labeller_width

    def _check_pooler_width(self) -> Iterator[str]:
        if self.pooler_kind == "none" and self.head_dim != self.d_model:
            yield (
                f"embedding_dim ({self.embedding_dim}) other than d_model ({self.d_model}) needs a "
                "pooler, which makes such vectors"
            )

    def _check_pooler_family(self) -> Iterator[str]:
        if self.family == "vit" and self.pooler_kind != "none":
            yield f"pooler ({self.pooler}) is for bert and labeller, got vit"

    def _check_labeller_width(self) -> Iterator[str]:
        if self.family == "labeller" and self.head_dim != self.d_model:
            yield "embedding_dim is for bert, got labeller"
