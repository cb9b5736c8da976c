"""The operator domain `tokenweir`: attention with a cache as one node, with a body per target.

An eager module emits a node while it is exported; `attach_bodies` of exporter/operator_bodies.py
then gives the graph the function that computes it. What the standard has an operator for is emitted
as that operator.

| operator              | inputs                                                                 |
|-----------------------|------------------------------------------------------------------------|
| CachedAttention       | packed_qkv, past_key, past_value, seqlens_k, total_seq, position_ids   |
| RotaryCachedAttention | the same, cos_cache, sin_cache                                         |
| Int8...               | of the two above, with an int8 cache: the same, key_scale, value_scale |
| CrossAttention        | query, cross_key, cross_value, source_lengths, beam_rows, row_queries  |
| CrossAlignment        | query, cross_key, source_lengths, alignment_idx, alignment_sources     |
"""

from __future__ import annotations

import torch
from torch import Tensor

DOMAIN = "tokenweir"
VERSION = 1
OPSET = 24

# Queries of one source that CrossAttention has a branch for, in the order in which it looks for
# them; the node says for each how many heads that makes.
GROUPED_WIDTHS = (4, 2, 8, 16)


def emit_cached_attention(
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
    """Emit a CachedAttention node, or with `rotary` a RotaryCachedAttention node.

    query [B, S, num_heads * D]; key, value [B, S, num_kv_heads * D]; past_key, past_value
    [B, num_kv_heads, L, D]; seqlens_k int32 [B]; total_seq int32 [1]; position_ids int64 [B, S];
    rotary, cosines and sines [L, D / 2]. Returns the output [B, S, num_heads * D] and both rows
    after the call.
    """
    packed = torch.cat((query, key, value), dim=-1)  # [B, S, (num_heads + 2 * num_kv_heads) * D]
    output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{'Rotary' if rotary else ''}CachedAttention",
        (packed, past_key, past_value, seqlens_k, total_seq, position_ids, *(rotary or ())),
        {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": past_key.shape[3],
            "scale": scale,
        },
        dtypes=(query.dtype, past_key.dtype, past_value.dtype),
        shapes=(query.shape, past_key.shape, past_value.shape),
        version=VERSION,
    )
    return output, present_key, present_value


def emit_cross_attention(
    query: Tensor,
    cross_key: Tensor,
    cross_value: Tensor,
    source_lengths: Tensor,
    beam_rows: Tensor,
    row_queries: Tensor,
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Emit a CrossAttention node into the graph being exported.

    query [B, S, num_heads * D]; cross_key, cross_value [C, num_heads, L, D], of which the first
    source_lengths[c] positions of row c are real; source_lengths int64 [C]; beam_rows int64 [C, G]:
    the rows of `query` that attend to source c, any row where there are fewer than G; row_queries
    int64 [B, S]: where each query stands in the flattened [C, G, S]. G or S is 1. Returns the
    output [B, S, num_heads * D].
    """
    head_dim = cross_key.shape[3]
    grouped = {f"num_heads_x{width}": num_heads * width for width in sorted(GROUPED_WIDTHS)}
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::CrossAttention",
        (query, cross_key, cross_value, source_lengths, beam_rows, row_queries),
        {
            "num_heads": num_heads,
            **grouped,
            "head_dim": head_dim,
            "width": num_heads * head_dim,
            "scale": scale,
        },
        dtype=query.dtype,
        shape=query.shape,
        version=VERSION,
    )


def emit_cross_alignment(
    query: Tensor,
    cross_key: Tensor,
    source_lengths: Tensor,
    alignment_idx: Tensor,
    alignment_sources: Tensor,
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Emit a CrossAlignment node into the graph being exported.

    alignment_idx int64 [M] into the flattened B*S queries, alignment_sources int64 [M] the source
    of each; the others as of emit_cross_attention. Returns the attention of those queries to their
    sources, the mean over the heads, float32 [M, L]: 0 beyond a source's end. With M = 0 nothing
    is computed, and the shape is [0, 0] or [0, L].
    """
    head_dim, capacity = cross_key.shape[3], cross_key.shape[2]
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::CrossAlignment",
        (query, cross_key, source_lengths, alignment_idx, alignment_sources),
        {
            "num_heads": num_heads,
            "head_dim": head_dim,
            "width": num_heads * head_dim,
            "capacity": capacity,
            "scale": scale,
        },
        dtype=torch.float32,
        shape=(alignment_idx.shape[0], capacity),
        version=VERSION,
    )


def emit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, num_heads: int, scale: float
) -> Tensor:
    """Emit a standard Attention node into the graph being exported.

    query, key [B, S, num_heads * d_k]; value [B, S, num_heads * d_v]; mask of keys bool
    [B, 1, 1, S]. Returns the output [B, S, num_heads * d_v].
    """
    if mask is not None:
        mask = _repeat_rows(mask)
    return torch.onnx.ops.symbolic(
        "Attention",
        (query, key, value, mask),
        {"q_num_heads": num_heads, "kv_num_heads": num_heads, "scale": scale},
        dtype=query.dtype,
        shape=(*query.shape[:2], value.shape[2]),
    )


def _repeat_rows(mask: Tensor) -> Tensor:
    """Turn a mask [B, 1, 1, S] into [B, 1, S, S]: the kernel broadcasts over heads only.

    The new shape is read off a tensor: arithmetic with sizes would leave a device for the CPU.
    """
    batch, length = mask.shape[0], mask.shape[3]
    columns = mask.unsqueeze(4)  # [B, 1, 1, S, 1]
    size = torch.onnx.ops.symbolic(
        "Shape", (columns,), {"start": 3}, dtype=torch.int64, shape=(2,)
    )  # S, 1
    return torch.onnx.ops.symbolic(
        "Expand", (mask, size), dtype=torch.bool, shape=(batch, 1, length, length)
    )


def emit_top(logits: Tensor, num_top: Tensor) -> tuple[Tensor, Tensor]:
    """Emit a TopK node: the num_top[0] largest of each row of logits [N, V], best first.

    Returns values and ids, both [N, k]; the lower id comes first among equals.
    """
    size = (logits.shape[0], 2)  # k is known to the graph only when it runs
    values, ids = torch.onnx.ops.symbolic_multi_out(
        "TopK",
        (logits, num_top),
        {"axis": -1, "largest": 1, "sorted": 1},
        dtypes=(logits.dtype, torch.int64),
        shapes=(size, size),
    )
    return values, ids


def emit_write_row(row: Tensor, update: Tensor) -> Tensor:
    """Emit a node that writes update [B, H, S, D] into the first positions of row [B, H, L, D].

    Where the row's memory is bound to the result too, it is written in place.
    """
    start = torch.zeros(row.shape[0], dtype=torch.int64)
    return torch.onnx.ops.symbolic(
        "TensorScatter", (row, update, start), {"axis": -2}, dtype=row.dtype, shape=row.shape
    )
