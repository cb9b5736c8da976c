"""Attention without a cache, as the standard's operator."""

from __future__ import annotations

import torch
from torch import Tensor


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
