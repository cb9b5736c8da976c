"""Rows of a cache, as a decoder's layers are given them.

A row belongs to one sequence. A layer's cache is [B, num_kv_heads, max_len, head_dim] for its keys
and for its values; head_dim is `config.cache_head_dim` for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from exporter.operators.cached_attention import cached_attention
from exporter.operators.cross_attention import SourceRow
from exporter.operators.heads import pad_heads, unpad_heads


@dataclass
class LayerCache:
    """Cached keys and values of one decoder layer; a forward pass replaces `key` and `value`."""

    key: Tensor  # (B, num_kv_heads, max_len, head_dim)
    value: Tensor  # (B, num_kv_heads, max_len, head_dim)
    seqlens_k: Tensor  # int32 (B,): length of the row after the pass, minus 1
    total_seq: Tensor  # int32 (1,): the largest length after the pass, or more
    position_ids: Tensor  # int64 (B, S): the positions that the pass writes
    cross: SourceRow | None = None  # only with cross-attention
    alignment_idx: Tensor | None = None  # int64 (M,): queries whose alignment is wanted
    alignment_sources: Tensor | None = None  # int64 (M,): the source that each of them attends to
    alignment: Tensor | None = None  # (M, max_len of the source), after a pass

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        value_dim: int,
        **options: Any,
    ) -> Tensor:
        """Keep new positions in the rows, and attend from them causally; (B, T, num_heads * d_v).

        query (B, T, num_heads * d_k), key and value (B, T, num_kv_heads * d_k or d_v), as wide as a
        model has its heads, or as the cache has them; the answer's are `value_dim` wide, whatever
        width the values have. `options` are those of `cached_attention`.
        """
        width = self.key.shape[-1]
        output, self.key, self.value = cached_attention(
            pad_heads(query, num_heads, width),
            pad_heads(key, num_kv_heads, width),
            pad_heads(value, num_kv_heads, width),
            self.key,
            self.value,
            self.seqlens_k,
            self.total_seq,
            self.position_ids,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            **options,
        )  # (B, T, num_heads * width)
        return unpad_heads(output, num_heads, value_dim)
