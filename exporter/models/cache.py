"""Attention over rows of a cache: the eager form of what an exported decoder runs.

A row belongs to one sequence. A layer's cache is [B, num_kv_heads, max_len, head_dim] for its keys
and for its values; head_dim is `cache_head_dim(config)` for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from exporter.models.config import TransformerConfig
from exporter.models.rotary import rotate
from exporter.operators import (
    emit_cached_attention,
    emit_cross_alignment,
    emit_cross_attention,
)

HEAD_DIM_MULTIPLE = 8  # the attention kernels take no other widths


@dataclass(frozen=True)
class SourceRow:
    """Keys and values of the source sentences, for one layer's cross-attention.

    Several rows of the decoder may attend to one source: the beams of a search.
    """

    key: Tensor  # (C, num_kv_heads, max_len, head_dim)
    value: Tensor  # (C, num_kv_heads, max_len, head_dim)
    source_lengths: Tensor  # int64 (C,)
    beam_rows: Tensor  # int64 (C, G): the decoder's rows of each source, any where there are fewer
    # int64 (B, S): where each query stands in the flattened (C, G, S); eager attention takes one
    # column of it for any S
    row_queries: Tensor

    @classmethod
    def one_each(cls, key: Tensor, value: Tensor, source_lengths: Tensor) -> SourceRow:
        """Return the source rows of a decoder whose row i attends to source i."""
        rows = torch.arange(key.shape[0], device=key.device)
        return cls(key, value, source_lengths, rows[:, None], rows[:, None])

    @property
    def of_rows(self) -> Tensor:
        """The source of each row of the decoder, int64 (B,)."""
        num_queries = self.row_queries.shape[1]
        return self.row_queries[:, 0] // (self.beam_rows.shape[1] * num_queries)


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


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    seqlens_k: Tensor,
    total_seq: Tensor,
    position_ids: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write S new positions into each row, then attend from them causally to their own row.

    query (B, S, num_heads * D); key, value (B, S, num_kv_heads * D); past_key, past_value
    (B, num_kv_heads, max_len, D); seqlens_k int32 (B,) = length of the row after this call,
    minus 1; total_seq int32 (1,) = at least the largest such length; position_ids int64 (B, S) =
    the new positions. With `rotary`, cosines and sines (max_len, D / 2), queries and keys are
    turned by their place in the row.
    Returns the output (B, S, num_heads * D) and the rows as they are afterwards. The new positions
    are the last S of the row. The one exception is a first call padded on the right (length below
    S): it writes positions 0 to S-1, and gives garbage for padding that later calls overwrite.
    """
    attend = emit_cached_attention if torch.onnx.is_in_onnx_export() else _eager_cached_attention
    return attend(
        query,
        key,
        value,
        past_key,
        past_value,
        seqlens_k,
        total_seq,
        position_ids,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        scale=scale,
        rotary=rotary,
    )


def _eager_cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    seqlens_k: Tensor,
    total_seq: Tensor,
    position_ids: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    query = split_heads(query, num_heads)  # (B, num_heads, S, D)
    key = split_heads(key, num_kv_heads)  # (B, num_kv_heads, S, D)
    value = split_heads(value, num_kv_heads)

    if rotary is not None:
        cos, sin = (table[position_ids][:, None] for table in rotary)  # (B, 1, S, D / 2)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)

    index = position_ids[:, None, :, None].expand_as(key)
    present_key = past_key.scatter(2, index, key)
    present_value = past_value.scatter(2, index, value)

    allowed = torch.arange(past_key.shape[2], device=query.device) <= position_ids[..., None]
    output = F.scaled_dot_product_attention(
        query,
        present_key,
        present_value,
        attn_mask=allowed[:, None],  # (B, 1, S, max_len)
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )
    return merge_heads(output), present_key, present_value


def cross_attention_over_row(
    query: Tensor, source: SourceRow, *, num_heads: int, scale: float
) -> Tensor:
    """Attend from every query to the real positions of its row's source.

    query (B, S, num_heads * D), where S is 1 if a source has several rows. Returns the same shape.
    """
    if torch.onnx.is_in_onnx_export():
        return emit_cross_attention(
            query,
            source.key,
            source.value,
            source.source_lengths,
            source.beam_rows,
            source.row_queries,
            num_heads=num_heads,
            scale=scale,
        )
    index = source.of_rows  # (B,)
    query = split_heads(query, num_heads)  # (B, num_heads, S, D)
    positions = torch.arange(source.key.shape[2], device=query.device)
    allowed = positions < source.source_lengths[index, None]  # (B, max_len)
    output = F.scaled_dot_product_attention(
        query,
        source.key[index],
        source.value[index],
        attn_mask=allowed[:, None, None],  # (B, 1, 1, max_len)
        scale=scale,
        enable_gqa=num_heads != source.key.shape[1],
    )
    return merge_heads(output)


def cross_alignment_over_row(
    query: Tensor,
    source: SourceRow,
    alignment_idx: Tensor,
    alignment_sources: Tensor,
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Return how much queries attend to each position of their source, the mean over the heads.

    query (B, S, num_heads * D); alignment_idx int64 (M,) into the flattened B*S, alignment_sources
    int64 (M,) the source of each. Returns float32 (M, max_len), 0 beyond the end of a source.
    """
    if torch.onnx.is_in_onnx_export():
        return emit_cross_alignment(
            query,
            source.key,
            source.source_lengths,
            alignment_idx,
            alignment_sources,
            num_heads=num_heads,
            scale=scale,
        )
    wanted = query.flatten(0, 1)[alignment_idx, None]  # (M, 1, num_heads * D)
    scores = split_heads(wanted, num_heads) @ source.key[alignment_sources].mT  # (M, h, 1, L)
    allowed = (
        torch.arange(scores.shape[-1]) < source.source_lengths[alignment_sources, None]
    )  # (M, L)
    masked = (scores * scale).masked_fill(~allowed[:, None, None], -torch.inf)
    return masked.softmax(dim=-1).mean(dim=(1, 2))


def split_heads(joined: Tensor, num_heads: int) -> Tensor:
    """Turn (B, S, num_heads * d) into (B, num_heads, S, d)."""
    batch, length, width = joined.shape
    return joined.view(batch, length, num_heads, width // num_heads).transpose(1, 2)


def merge_heads(heads: Tensor) -> Tensor:
    """Turn (B, num_heads, S, d) into (B, S, num_heads * d)."""
    return heads.transpose(1, 2).flatten(2)


def pad_heads(joined: Tensor, num_heads: int, width: int) -> Tensor:
    """Widen every head with zeros: (B, S, num_heads * d) to (B, S, num_heads * width).

    Zeros change neither a dot product nor the real part of the weighted values, as long as the
    scale stays that of the narrow keys.
    """
    head_dim = joined.shape[-1] // num_heads
    if head_dim == width:
        return joined
    return merge_heads(F.pad(split_heads(joined, num_heads), (0, width - head_dim)))


def unpad_heads(joined: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Undo `pad_heads`: (B, S, num_heads * width) to (B, S, num_heads * head_dim)."""
    if joined.shape[-1] == num_heads * head_dim:
        return joined
    return merge_heads(split_heads(joined, num_heads)[..., :head_dim])
