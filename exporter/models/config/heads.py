"""Options of what one-pass families make of the last layer."""

from __future__ import annotations

from typing import Annotated, Literal

from engine.package.manifest import LabelScores
from exporter.models.config.sizes import SizeOptions, Width, unless

Pooling = Literal["first", "mean", "max"]
Pooler = Literal["tanh", "relu", "gelu", "gelu_tanh", "silu", "linear", "none"]


class HeadOptions(SizeOptions):
    """From vectors of tokens to the one of a text, and to labels."""

    pooling: Annotated[Pooling, unless("first")] = "first"  # of bert: which vector is the text's
    # A dense layer behind it, of a labeller on every token, by its activation; None: tanh of bert
    pooler: Annotated[Pooler | None, unless(None)] = None
    pooler_bias: Annotated[bool, unless(True)] = True
    pooler_norm: Annotated[bool, unless(False)] = False  # behind the activation
    embedding_dim: Annotated[Width | None, unless(None)] = None  # of the pooler; None: d_model
    normalize: Annotated[bool, unless(False)] = False  # vectors of length 1
    # What makes probabilities of logits: one label of many, or each by itself; none: they are told
    label_scores: Annotated[LabelScores, unless("softmax")] = "softmax"

    @property
    def pooler_kind(self) -> Pooler:
        """What stands between the last layer and the classifier."""
        return self.pooler or ("tanh" if self.family == "bert" else "none")

    @property
    def head_dim(self) -> int:
        """Width of what the classifier reads, and of the vector of a text."""
        return self.embedding_dim or self.d_model

    @property
    def head_option_problems(self) -> list[str]:
        """Say what of the head does not go together."""
        found = []
        if self.pooler_kind == "none" and self.head_dim != self.d_model:
            found.append(
                f"embedding_dim ({self.embedding_dim}) other than d_model ({self.d_model}) needs a "
                "pooler, which makes such vectors"
            )
        if self.family == "vit" and self.pooler_kind != "none":
            found.append(f"pooler ({self.pooler}) is for bert and labeller, got vit")
        if self.family == "labeller" and self.head_dim != self.d_model:
            found.append("embedding_dim is for bert, got labeller")
        return found
