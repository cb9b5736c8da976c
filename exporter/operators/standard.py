"""Operators of the standard that torch exports in no other way, or not as kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor


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

    If the row's memory is bound to the result too, it is written in place.
    """
    return torch.onnx.ops.symbolic(
        "TensorScatter", (row, update), {"axis": -2}, dtype=row.dtype, shape=row.shape
    )


def emit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, num_heads: int, scale: float
) -> Tensor:
    """Emit a standard Attention node into the graph being exported.

    query, key [B, S, num_heads * d_k]; value [B, S, num_heads * d_v]; mask bool, of keys
    [B, 1, 1, S] or of each query [B, 1, S, S], or what is added to scores, float
    [B or 1, num_heads, S, S]. Returns the output [B, S, num_heads * d_v].
    """
    if mask is not None and mask.dtype == torch.bool and mask.shape[2] == 1:
        # The kernel broadcasts over heads only. Graphs for CUDA have the lengths in place of such
        # a mask: exporter/graphs/shapes.py.
        batch, length = mask.shape[0], mask.shape[3]
        columns = mask.unsqueeze(4)  # [B, 1, 1, S, 1]
        size = torch.onnx.ops.symbolic(
            "Shape", (columns,), {"start": 3}, dtype=torch.int64, shape=(2,)
        )  # S, 1
        mask = torch.onnx.ops.symbolic(
            "Expand", (mask, size), dtype=torch.bool, shape=(batch, 1, length, length)
        )
    return torch.onnx.ops.symbolic(
        "Attention",
        (query, key, value, mask),
        {"q_num_heads": num_heads, "kv_num_heads": num_heads, "scale": scale},
        dtype=query.dtype,
        shape=(*query.shape[:2], value.shape[2]),
    )
