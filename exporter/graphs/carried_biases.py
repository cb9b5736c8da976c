"""Lets a product behind a norm carry its bias in its weights: a launch less for each.

A norm takes the mean away: n, what it makes of a row before its own weight and shift, sums to 0.
Shifted by a constant c, it has the same sum in every row, d * c for a width of d, and from that sum
a matrix can make any bias b, by a number s for each of its columns:

    (n + c) @ (M + s) = n @ M + c * sum(M) + d * c * s = n @ M + b,  s = (b / c - sum(M)) / d

The norm's own weight and shift go into M and b. A norm of mean squares leaves no such room.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript.rewriter import RewriteRule

from exporter.graphs.constants import array_of, rank_of

# c: in half precision a large one costs digits of the row, a small one digits of the weights.
SHIFT = 0.25

_Array = NDArray[np.float32]


def _normed_product(op: Any, x: Any, weight: Any, shift: Any, matrix: Any, bias: Any) -> Any:
    normed = op.LayerNormalization(x, weight, shift, _outputs=["normed"])
    return op.Add(op.MatMul(normed, matrix), bias)


def _carried(
    op: Any,
    x: ir.Value,
    weight: ir.Value,
    shift: ir.Value,
    matrix: ir.Value,
    bias: ir.Value,
    normed: ir.Value,
) -> Any:
    node = normed.producer()
    assert node is not None, "the pattern has made it"
    product, column = _with_column(*map(_numbers, (weight, shift, matrix, bias)))

    def stored(name: str, array: NDArray[Any]) -> Any:
        value = ir.tensor(array.astype(array_of(matrix).dtype))
        return op.initializer(value, name=f"{normed.name}.{name}")

    ones = np.ones_like(product[:, 0])
    weights = stored("ones", ones), stored("shift", SHIFT * ones)
    shifted = op.LayerNormalization(x, *weights, **node.attributes)
    carrying = product + column
    if array_of(matrix).dtype != np.float32:
        carrying = _rounded(carrying, array_of(matrix).dtype)
    return op.MatMul(shifted, stored("matrix", carrying))


def _with_column(
    weight: _Array, shift: _Array, matrix: _Array, bias: _Array
) -> tuple[_Array, _Array]:
    """Return M [d, N] and s [N] of weight, shift [d], matrix [d, N] and bias [N]."""
    product = weight[:, None] * matrix
    return product, ((bias + shift @ matrix) / SHIFT - product.sum(axis=0)) / len(product)


def _rounded(matrix: _Array, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Round a matrix [d, N] so that its columns keep their sums, which make the bias.

    M is a matrix of rounded numbers already, so M + s would be rounded the same way in most rows of
    a column, and the bias be off by the sum. The loss of a number is added to the next one.
    """
    found, lost = np.empty(matrix.shape, dtype), np.zeros(matrix.shape[1], np.float32)
    for rounded, row in zip(found, matrix, strict=True):
        wanted = row + lost
        rounded[:] = wanted.astype(dtype)
        lost = wanted - rounded.astype(np.float32)
    return found


def _can_carry(
    _: Any, weight: ir.Value, shift: ir.Value, matrix: ir.Value, bias: ir.Value, **__: ir.Value
) -> bool:
    """Weights that a bias would dwarf would lose their digits: it is added as before."""
    given = (weight, shift, matrix, bias)
    if [rank_of(value) for value in given] != [1, 1, 2, 1]:
        return False
    product, column = _with_column(*map(_numbers, given))
    return bool((np.abs(column) <= np.abs(product).max(axis=0)).all())


def _numbers(value: ir.Value) -> _Array:
    return array_of(value).astype(np.float32)


def carried_bias() -> RewriteRule:
    """Return the rule."""
    return RewriteRule(_normed_product, _carried, _can_carry)
