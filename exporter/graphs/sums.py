"""Says sums so that a row has the same bits alone and in a batch: onnxruntime's depend on it.

| node                                               | becomes                                |
|----------------------------------------------------|----------------------------------------|
| ReduceSum, ReduceMean over the last axis but one   | a product of ones, divided by the size |
| RMSNormalization without weights, by ones computed | by constant ones, which has a kernel   |

Our own blocks have neither; people's own classes do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import RewriteRule, RewriteRuleSet

from exporter.graphs.constants import integers_of

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def replace_sums(model: ir.Model) -> None:
    """Rewrite a graph in place."""
    # Rules are made anew, for they keep the last graph that they matched, with its weights.
    rules = RewriteRuleSet(
        [
            RewriteRule(_sum, _product, _is_over_rows),
            RewriteRule(_mean, _product, _is_over_rows),
            RewriteRule(_norm, _norm_by_constant, _is_over_width),
        ]
    )
    rules.apply_to_model(model)


def _sum(op: Any, x: Any, axes: Any) -> Any:
    return op.ReduceSum(x, axes, _allow_other_attributes=True, _outputs=["total"])


def _mean(op: Any, x: Any, axes: Any) -> Any:
    return op.ReduceMean(x, axes, _allow_other_attributes=True, _outputs=["total"])


def _product(op: Any, x: ir.Value, axes: ir.Value, total: ir.Value) -> Any:
    """Multiply ones (1, n) by x (..., n, D)."""
    assert x.shape is not None, "of x the number of axes is known"
    place, name = len(x.shape) - 2, total.name
    size = op.Shape(x, start=place, end=place + 1)
    one = op.initializer(ir.tensor(np.array([1])), name=f"{name}.one")
    ones = op.ConstantOfShape(op.Concat(one, size, axis=0), value=ir.tensor(np.ones(1, np.float32)))
    product = op.MatMul(op.Cast(ones, to=x.dtype), x)
    node = total.producer()
    assert node is not None, "it was found by its node"
    if node.op_type == "ReduceMean":
        product = op.Div(product, op.Cast(size, to=x.dtype))
    return product if node.attributes.get_int("keepdims", 1) else op.Squeeze(product, axes)


def _is_over_rows(_: Any, x: ir.Value, axes: ir.Value, **__: ir.Value) -> bool:
    if x.shape is None or x.dtype not in _FLOATS:
        return False
    return integers_of(axes) in ([-2], [len(x.shape) - 2])


def _norm(op: Any, x: Any, shape: Any) -> Any:
    ones = op.ConstantOfShape(shape, _allow_other_attributes=True, _outputs=["ones"])
    return op.RMSNormalization(x, ones, _allow_other_attributes=True, _outputs=["norm"])


def _norm_by_constant(op: Any, x: ir.Value, ones: ir.Value, norm: ir.Value, **_: ir.Value) -> Any:
    made, node = ones.producer(), norm.producer()
    assert made is not None and node is not None, "they were found by their nodes"
    width = None if x.shape is None else x.shape[-1]
    assert isinstance(width, int), "it was looked at"
    numbers = np.full(width, made.attributes["value"].as_tensor().numpy())
    scale = op.initializer(ir.tensor(numbers), name=f"{norm.name}.scale")
    return op.RMSNormalization(x, scale, **node.attributes)


def _is_over_width(_: Any, x: ir.Value, ones: ir.Value, norm: ir.Value, **__: ir.Value) -> bool:
    made, node = ones.producer(), norm.producer()
    if x.shape is None or made is None or node is None or "value" not in made.attributes:
        return False
    is_last = node.attributes.get_int("axis", -1) in (-1, len(x.shape) - 1)
    return is_last and isinstance(x.shape[-1], int)
