"""Says reductions without cuDNN, by which onnxruntime's CUDA provider computes them.

Nothing else in a graph wants that library, and it is opened only when such a node first runs.

| node                             | becomes                                             |
|----------------------------------|-----------------------------------------------------|
| ReduceL2 over the last axis      | root of the product of a row with itself, in float32 |
| ReduceMax over one axis          | TopK with k = 1                                     |
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import RewriteRule, RewriteRuleSet

from exporter.graphs.constants import integers_of


def replace_reductions(model: ir.Model) -> None:
    """Rewrite a graph in place."""
    # Rules are made anew, for they keep the last graph that they matched, with its weights.
    rules = RewriteRuleSet(
        [
            RewriteRule(
                lambda op, x, axes: op.ReduceL2(x, axes, keepdims=1, _outputs=["reduced"]),
                _root_of_product,
                _is_last,
            ),
            RewriteRule(
                lambda op, x, axes: op.ReduceMax(x, axes, keepdims=0, _outputs=["reduced"]),
                _first_of_top,
                lambda _, axes, **__: len(integers_of(axes)) == 1,
            ),
        ]
    )
    rules.apply_to_model(model)


def _root_of_product(op: Any, x: ir.Value, reduced: ir.Value, **_: ir.Value) -> Any:
    wide = op.Cast(x, to=ir.DataType.FLOAT)  # squares soon pass the largest float16
    columns, rows = _axes(op, reduced, "column", -1), _axes(op, reduced, "row", -2)
    product = op.MatMul(op.Unsqueeze(wide, rows), op.Unsqueeze(wide, columns))  # [..., 1, 1]
    return op.Cast(op.Sqrt(op.Squeeze(product, columns)), to=x.dtype)


def _first_of_top(op: Any, x: ir.Value, axes: ir.Value, reduced: ir.Value) -> Any:
    (axis,) = integers_of(axes)
    values, _ = op.TopK(x, _axes(op, reduced, "k", 1), axis=axis, _outputs=2)
    return op.Squeeze(values, axes)


def _axes(op: Any, reduced: ir.Value, name: str, number: int) -> Any:
    return op.initializer(ir.tensor(np.array([number])), name=f"{reduced.name}.{name}")


def _is_last(_: Any, x: ir.Value, axes: ir.Value, **__: ir.Value) -> bool:
    if x.shape is None or x.dtype is None:
        return False
    return integers_of(axes) in ([-1], [len(x.shape) - 1])
