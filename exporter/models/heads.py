"""The head of a one-pass model: one vector for a text, and labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from exporter.models.config import TransformerConfig
from exporter.models.layers import ACTIVATIONS, make_linear

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    **ACTIVATIONS,
    "tanh": nn.Tanh,
    "linear": nn.Identity,
}
_SHORTEST = 1e-12  # a vector of zeros stays one


class Pooler(nn.Linear):
    """A dense layer on vectors (..., d_model), its activation and, where there is one, a norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.d_model, config.head_dim, bias=config.head.pooler_bias)
        nn.init.xavier_uniform_(self.weight)
        if config.head.pooler_bias:
            nn.init.zeros_(self.bias)
        self.activation = _ACTIVATIONS[config.pooler_kind]()
        self.norm: nn.Module = nn.Identity()
        if config.head.pooler_norm:
            self.norm = nn.LayerNorm(config.head_dim, config.norm_eps, bias=config.norm_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., d_model) to (..., head_dim)."""
        output: Tensor = self.norm(self.activation(super().forward(hidden)))
        return output


def make_pooler(config: TransformerConfig) -> nn.Module:
    """Return what stands before the classifier, Identity where nothing does."""
    return nn.Identity() if config.pooler_kind == "none" else Pooler(config)


def make_classifier(config: TransformerConfig) -> nn.Linear | None:
    """Return what makes logits of a vector (..., head_dim), None without labels."""
    return make_linear(config.head_dim, len(config.labels)) if config.labels else None


def pool(hidden: Tensor, mask: Tensor | None, kind: str) -> Tensor:
    """Return the one vector (B, d_model) of hidden (B, S, d_model).

    mask bool (B, S), True = real token; `kind` is first, mean or max.
    """
    if kind == "first":
        return hidden[:, 0]
    if kind == "mean":
        return mean_of(hidden, mask)
    if mask is not None:
        hidden = hidden.masked_fill(~mask[:, :, None], torch.finfo(hidden.dtype).min)
    return hidden.amax(dim=1)


def mean_of(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean vector (B, d_model) of the real tokens of hidden (B, S, d_model)."""
    if mask is None:
        return hidden.mean(dim=1)
    # A product, not a sum over the axis: onnxruntime sums in an order that depends on the batch.
    weights = mask.unsqueeze(1).to(hidden.dtype)  # (B, 1, S)
    total = (weights @ hidden).squeeze(1)  # (B, d_model)
    return total / weights.sum(dim=2).clamp(min=1)


def to_unit_length(vectors: Tensor) -> Tensor:
    """Return vectors (B, D) scaled to length 1."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)  # (B, 1)
    return vectors / lengths.clamp(min=_SHORTEST)
