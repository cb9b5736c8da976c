"""Operators of the standard that torch exports in no other way."""

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
