"""Multi-head attention: scores of queries against keys, weights, and weighted values.

Masks are bool, True where a query may attend, and broadcast to (B, num_heads, T, S): B sequences,
T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.cache import LayerCache
from exporter.models.config import TransformerConfig
from exporter.models.positions import RelativePositions, RotaryPositions
from exporter.operators.cross_alignment import cross_alignment_over_row
from exporter.operators.cross_attention import cross_attention_over_row
from exporter.operators.heads import merge_heads, pad_heads, split_heads, unpad_heads
from exporter.operators.standard import emit_attention


class AttentionOutput(NamedTuple):
    """The output of attention beside its probabilities, which were asked for."""

    output: Tensor  # (B, T, d_model)
    probabilities: Tensor  # (B, num_heads, T, S), before dropout


def padding_mask(mask: Tensor | None) -> Tensor | None:
    """Turn bool (B, S), True = real token, into the mask of keys (B, 1, 1, S)."""
    return None if mask is None else mask[:, None, None, :]


def causal_mask(
    num_queries: int,
    num_keys: int,
    device: torch.device | None = None,
    *,
    window: int | None = None,
) -> Tensor:
    """Return bool (T, S) by which a query attends to its own position and those before it.

    With `window` only to the last so many of these.
    """
    queries = torch.arange(num_queries, device=device)[:, None]
    keys = torch.arange(num_keys, device=device)
    return keys <= queries if window is None else (keys <= queries) & (keys > queries - window)


def cap(values: Tensor, limit: float | None) -> Tensor:
    """Return limit * tanh(values / limit); the values themselves if there is no limit."""
    return values if limit is None else limit * torch.tanh(values / limit)


def local_mask(places: Tensor, window: int, mask: Tensor | None) -> Tensor:
    """Return the mask (S, S) by which a query attends to keys nearer than `window` on either side.

    places int64 (S,) count from 0; with a mask of keys (B, 1, 1, S) both hold: (B, 1, S, S).
    """
    near = (places[:, None] - places).abs() < window
    return near if mask is None else mask & near


def dot_product_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return q . k * scale, (B, h, T, S), for query (B, h, T, d_k) and key (B, h, S, d_k)."""
    return query @ key.transpose(-2, -1) * scale


def additive_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Return w^T tanh(q + k), (B, h, T, S), with a w for each head: weight (h, d_k)."""
    if len(weight) == 1:
        # onnxruntime joins the rows of a batch where all share the matrix on the right, and bits
        # depend on how many there are. With w on the left every query has a product of its own.
        columns = torch.tanh(query.unsqueeze(4) + key.mT.unsqueeze(2))  # (B, 1, T, d_k, S)
        return torch.matmul(weight, columns).squeeze(3)
    features = torch.tanh(query.unsqueeze(3) + key.unsqueeze(2))  # (B, h, T, S, d_k)
    return torch.matmul(features, weight[:, None, :, None]).squeeze(-1)


def softmax_weights(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return softmax over the allowed keys, zeros where there is none; shape of `scores`."""
    if mask is None:
        return scores.softmax(dim=-1)
    # A finite minimum: minus infinity everywhere would give NaN in a fully masked row.
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0)


def relu_weights(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return relu(score) / number of allowed keys; shape of `scores`.

    The division is that of Wortsman et al. 2023, "Replacing softmax with ReLU in Vision
    Transformers": it keeps the size of the output independent of the sequence length. Only allowed
    keys are counted, so padding changes nothing.
    """
    if mask is None:
        return scores.relu() / scores.shape[-1]
    count = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return scores.relu().masked_fill(~mask, 0.0) / count


class MultiHeadAttention(nn.Module):
    """Section 3.2.2 of Vaswani et al. 2017, with key and value widths of their own.

    W_Q, W_K: [d_model, h * d_k]; W_V: [d_model, h * d_v]; W_O: [h * d_v, d_model].
    With fewer heads of keys and values (Ainslie et al. 2023) each is for as many neighbouring query
    heads. With `rotary` queries and keys are turned, with `relative` scores are biased. Without W_O
    the heads' values, d_model of them, are the output. Causal queries see no more than `window`
    keys. Additive scores are w^T tanh(W_q q + W_k k), with a w [d_k] for each head.
    """

    def __init__(
        self,
        config: TransformerConfig,
        rotary: RotaryPositions | None = None,
        relative: RelativePositions | None = None,
        *,
        window: int | None = None,
    ) -> None:
        super().__init__()
        options = config.attention
        self.num_heads = config.num_heads
        self.num_kv_heads = config.kv_heads
        self.rotary = rotary
        self.relative = relative
        self.key_dim = config.head_key_dim
        self.value_dim = config.head_value_dim
        self.score = options.score
        self.normalizer = options.normalizer
        self.scale = self.key_dim**-0.5 if options.scale is None else options.scale
        self.softcap = options.softcap
        self.window = window
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.key_dim, eps=config.norm_eps) if options.qk_norm else None
            for _ in range(2)
        )
        keys, values = self.num_kv_heads * self.key_dim, self.num_kv_heads * self.value_dim
        self.q_proj = nn.Linear(config.d_model, self.num_heads * self.key_dim, bias=options.bias)
        self.k_proj = nn.Linear(config.d_model, keys, bias=options.bias)
        self.v_proj = nn.Linear(config.d_model, values, bias=options.bias)
        self.out_proj: nn.Linear | None = None
        if options.output:
            has_bias = options.bias if options.output_bias is None else options.output_bias
            self.out_proj = nn.Linear(
                self.num_heads * self.value_dim, config.d_model, bias=has_bias
            )
        weight = torch.empty(self.num_heads, self.key_dim) if self.score == "additive" else None
        self.score_weight = None if weight is None else nn.Parameter(weight)
        self.attention_dropout = nn.Dropout(options.dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights: Xavier for the projections, zero biases."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection is None:
                continue
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.score_weight is not None:
            nn.init.normal_(self.score_weight, std=self.key_dim**-0.5)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend from `query` (B, T, d_model) to `key` and `value` (B, S, d_model).

        Returns (B, T, d_model). With `is_causal` query i sees keys 0 to i, as far as `mask` allows.
        """
        is_plain = (self.score, self.normalizer, self.softcap) == ("dot", "softmax", None)
        if not is_plain or self.window is not None:
            return self.with_probabilities(query, key, value, mask, is_causal=is_causal).output
        if torch.onnx.is_in_onnx_export() and not is_causal:
            return self._project_output(
                emit_attention(
                    self._turned(self.q_proj(query)),
                    self._turned(self.k_proj(key)),
                    self.v_proj(value),
                    self._biased(mask, query, key),
                    num_heads=self.num_heads,
                    scale=self.scale,
                )
            )
        q, k, v = self._heads(query, key, value)
        if is_causal and (mask is not None or self.relative is not None):
            mask, is_causal = _combine(mask, q, k), False
        heads = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self._biased(mask, query, key),
            dropout_p=self.attention_dropout.p if self.training else 0.0,
            is_causal=is_causal,
            scale=self.scale,
        )  # (B, h, T, d_v)
        return self._project_output(merge_heads(heads))

    def with_probabilities(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> AttentionOutput:
        """Do as `forward`, by separate steps, and return the attention probabilities too."""
        q, k, v = self._heads(query, key, value)
        if is_causal:
            mask = _combine(mask, q, k, self.window)
        normalize = softmax_weights if self.normalizer == "softmax" else relu_weights
        probabilities = normalize(self._scores(q, k), mask)  # (B, h, T, S)
        heads = self.attention_dropout(probabilities) @ v  # (B, h, T, d_v)
        output = self._project_output(merge_heads(heads))
        return AttentionOutput(output, probabilities)

    def forward_cached(self, hidden: Tensor, cache: LayerCache) -> Tensor:
        """Attend causally from new positions (B, T, d_model) to themselves and the cached ones.

        The cache afterwards holds the new positions too.
        """
        heads = cache.attend(
            self._queries(hidden),
            self._keys(hidden),
            self.v_proj(hidden),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            value_dim=self.value_dim,
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
            rotary=None if self.rotary is None else (self.rotary.cos, self.rotary.sin),
            distance_bias=None if self.relative is None else self.relative.by_distance(),
        )  # (B, T, h * d_v)
        return self._project_output(heads)

    def forward_over_row(self, hidden: Tensor, cache: LayerCache) -> Tensor:
        """Attend from `hidden` (B, T, d_model) to the source kept in the rows of the cache.

        The cache afterwards has the alignment of the positions that it names.
        """
        cross = cache.cross
        assert cross is not None, "a decoder with cross-attention gets a cache with a source row"
        width = cross.key.shape[-1]
        query = pad_heads(self.q_proj(hidden), self.num_heads, width)
        output = cross_attention_over_row(
            query, cross, num_heads=self.num_heads, scale=self.scale
        )  # (B, T, h * width)
        if cache.alignment_idx is not None and cache.alignment_sources is not None:
            cache.alignment = cross_alignment_over_row(
                query,
                cross,
                cache.alignment_idx,
                cache.alignment_sources,
                num_heads=self.num_heads,
                scale=self.scale,
            )
        return self._project_output(unpad_heads(output, self.num_heads, self.value_dim))

    def key_value_rows(self, memory: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of `memory` (B, S, d_model) as a cache keeps them.

        Both are (B, num_heads, S, width), the heads padded with zeros up to `width`.
        """
        key = pad_heads(self.k_proj(memory), self.num_heads, width)
        value = pad_heads(self.v_proj(memory), self.num_heads, width)
        return split_heads(key, self.num_heads), split_heads(value, self.num_heads)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        if self.score_weight is not None:
            return additive_scores(q, k, self.score_weight)
        scores = cap(dot_product_scores(q, k, self.scale), self.softcap)
        return scores if self.relative is None else scores + self._bias(q, k)

    def _bias(self, query: Tensor, key: Tensor) -> Tensor:
        assert self.relative is not None
        return self.relative.between(query.shape[-2], key.shape[-2])

    def _biased(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """Return what is added to scores, or the mask where positions add nothing."""
        if self.relative is None:
            return mask
        bias = self._bias(query, key)
        return bias if mask is None else torch.where(mask, bias, -torch.inf)

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = split_heads(self._queries(query), self.num_heads)  # (B, h, T, d_k)
        k = split_heads(self._keys(key), self.num_kv_heads)  # (B, num_kv_heads, S, d_k)
        v = split_heads(self.v_proj(value), self.num_kv_heads)  # (B, num_kv_heads, S, d_v)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        group = self.num_heads // self.num_kv_heads
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return q, k, v  # each with h heads

    def _turned(self, joined: Tensor) -> Tensor:
        """Turn the heads of (B, S, num_heads * d_k) by their places, if the model does."""
        if self.rotary is None:
            return joined
        return merge_heads(self.rotary(split_heads(joined, self.num_heads)))

    def _queries(self, hidden: Tensor) -> Tensor:
        """Return the queries (B, T, num_heads * d_k), divided by their size if so configured."""
        return _norm_heads(self.q_proj(hidden), self.q_norm, self.key_dim)

    def _keys(self, hidden: Tensor) -> Tensor:
        """Do the same for the keys (B, S, num_kv_heads * d_k)."""
        return _norm_heads(self.k_proj(hidden), self.k_norm, self.key_dim)

    def _project_output(self, heads: Tensor) -> Tensor:
        output: Tensor = self.dropout(heads if self.out_proj is None else self.out_proj(heads))
        return output


@contextmanager
def record_probabilities(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collect the attention probabilities of every forward pass of `model` in the block.

    The dictionary maps the name of a MultiHeadAttention in the model to its probabilities
    (B, num_heads, T, S) in the latest pass; the passes themselves are unchanged.
    """
    recorded: dict[str, Tensor] = {}

    def recorder(name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert isinstance(module, MultiHeadAttention)
            recorded[name] = module.with_probabilities(*args, **kwargs).probabilities.detach()

        return record

    handles = [
        module.register_forward_pre_hook(recorder(name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention)
    ]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _norm_heads(joined: Tensor, norm: nn.RMSNorm | None, head_dim: int) -> Tensor:
    """Norm every head of (B, S, h * head_dim)."""
    if norm is None:
        return joined
    heads: Tensor = norm(joined.view(*joined.shape[:2], -1, head_dim))
    return heads.flatten(2)


def _combine(mask: Tensor | None, query: Tensor, key: Tensor, window: int | None = None) -> Tensor:
    causal = causal_mask(query.shape[-2], key.shape[-2], query.device, window=window)
    return causal if mask is None else mask & causal
