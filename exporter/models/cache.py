"""Rows of a cache, as a decoder's layers are given them.

A row belongs to one sequence. A layer's cache is [B, num_kv_heads, max_len, head_dim] for its keys
and for its values; head_dim is `cache_head_dim(config)` for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from exporter.models.config import TransformerConfig
from exporter.operators.cross_attention import SourceRow

HEAD_DIM_MULTIPLE = 8  # the attention kernels take no other widths


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


def cache_head_dim(config: TransformerConfig) -> int:
    """Return the head width of the cache: the wider of keys and values, up to a multiple of 8."""
    widest = max(config.head_key_dim, config.head_value_dim)
    return -(-widest // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
