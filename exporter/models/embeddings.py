"""The input of the first layer: token embeddings plus positions."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.config import TransformerConfig
from exporter.models.positions import INIT_STD, make_positions


def make_token_embedding(config: TransformerConfig, vocab_size: int) -> nn.Embedding:
    """Return token vectors [vocab_size, d_model], drawn so that they have unit size when scaled.

    They are as wide as `token_dim` where there is one.
    """
    embedding = nn.Embedding(vocab_size, config.token_dim or config.d_model)
    std = config.d_model**-0.5 if config.scale_embeddings else INIT_STD
    nn.init.normal_(embedding.weight, std=std)
    return embedding


def make_norm(config: TransformerConfig) -> nn.Module:
    """Return a norm over the width of the model: of mean and variance, or of the mean square."""
    if config.norm == "rms":
        kind = NarrowingRMSNorm if config.feed_forward.float32_output else nn.RMSNorm
        return kind(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.norm_bias)


class NarrowingRMSNorm(nn.RMSNorm):
    """A norm of the mean square that gives its weights' type, whatever the type that it reads."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., d_model) to the same shape."""
        if hidden.dtype == self.weight.dtype:
            return super().forward(hidden)
        weight = self.weight.to(hidden.dtype)
        normed = F.rms_norm(hidden, self.normalized_shape, weight, self.eps)
        return normed.to(self.weight.dtype)


class Embeddings(nn.Module):
    """Token embeddings, scaled by sqrt(d_model) or not, plus positions (plus token types).

    Positions may leave a token out of their count, which has the place before the first.
    """

    def __init__(
        self,
        config: TransformerConfig,
        max_len: int,
        token: nn.Embedding | None = None,
        *,
        uncounted: int | None = None,
    ) -> None:
        super().__init__()
        if token is None:
            token = make_token_embedding(config, config.vocab_size)
        self.token = token
        self.token_in: nn.Module = nn.Identity()
        if config.token_dim is not None:
            self.token_in = nn.Linear(config.token_dim, config.d_model, bias=False)
            nn.init.xavier_uniform_(self.token_in.weight)
        self.uncounted = uncounted
        self.positions = make_positions(config, max_len, one_before=uncounted is not None)
        self.token_type: nn.Embedding | None = None
        if config.num_token_types:
            self.token_type = nn.Embedding(config.num_token_types, config.d_model)
            nn.init.normal_(self.token_type.weight, std=INIT_STD)
        self.norm: nn.Module = nn.Identity()
        if config.embedding_norm:
            self.norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self.scale = config.d_model**0.5 if config.scale_embeddings else 1.0

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Return (B, S, d_model) for int64 ids (B, S); positions count from 0 if not given."""
        hidden = self.token_in(self.token(input_ids)) * self.scale
        if self.uncounted is not None:
            is_counted = (input_ids != self.uncounted).long()
            position_ids = is_counted.cumsum(dim=1) * is_counted  # 0: the place before the first
        if self.positions is not None:
            if position_ids is None:
                hidden = hidden + self.positions.first(input_ids.shape[1])
            else:
                hidden = hidden + self.positions(position_ids)
        if self.token_type is not None:
            if token_type_ids is None:
                hidden = hidden + self.token_type.weight[0]
            else:
                hidden = hidden + self.token_type(token_type_ids)
        output: Tensor = self.dropout(self.norm(hidden))
        return output
