"""The keys and values of a source, written into its row, as the standard's operator."""

from __future__ import annotations

import torch
from torch import Tensor


def emit_write_row(row: Tensor, update: Tensor) -> Tensor:
    """Emit a node that writes update [B, H, S, D] into the first positions of row [B, H, L, D].

    If the row's memory is bound to the result too, it is written in place.
    """
    return torch.onnx.ops.symbolic(
        "TensorScatter", (row, update), {"axis": -2}, dtype=row.dtype, shape=row.shape
    )
