"""Joins neighbouring nodes into kernels that onnxruntime has on CUDA: a launch saved is time saved.

Every rule says the same in fewer nodes; rounding may differ, as a fused kernel rounds less often.
They are for that target only: on CPU the fused norm takes longer than what it replaces.

| nodes                          | become                                           |
|--------------------------------|--------------------------------------------------|
| queries, keys, values          | one product: exporter/graphs/joined_products.py  |
| norm, product, bias            | norm, product: exporter/graphs/carried_biases.py |
| bias, residual, norm           | SkipLayerNormalization                           |
| residual, norm of mean squares | SkipSimplifiedLayerNormalization                 |
| bias, GELU                     | BiasGelu, or with its tanh form FastGelu         |
| x * sigmoid(x)                 | QuickGelu with alpha 1                           |
| rows of a table, by an index   | rows of one table: a bias for each distance      |
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.rewriter import RewriteRule, RewriteRuleSet

from exporter.graphs.carried_biases import carried_bias
from exporter.graphs.constants import array_of, rank_of
from exporter.graphs.joined_products import join_products

_CONTRIB = "com.microsoft"


def fuse(model: ir.Model) -> None:
    """Rewrite a graph in place."""
    join_products(model)
    # The order counts: an activation adds the bias before it for nothing, and a norm that adds a
    # residual is none by itself any more. Rules are made anew, for they keep the last graph that
    # they matched, with its weights.
    for rules in (
        [
            RewriteRule(
                lambda op, x, bias: op.Gelu(op.Add(x, bias), _outputs=["gelu"]),
                _fused_gelu,
                _is_bias,
            ),
            RewriteRule(
                lambda op, x: op.Mul(x, op.Sigmoid(x)),
                lambda op, x: op.QuickGelu(x, alpha=1.0, _domain=_CONTRIB),
            ),
            RewriteRule(
                lambda op, table, index, places: op.Gather(
                    table, op.Gather(index, places, axis=0), axis=0
                ),
                _one_row,
                _are_tables,
            ),
        ],
        [carried_bias()],
        [
            RewriteRule(_bias_residual_norm, _skip_norm, _is_bias),
            RewriteRule(_residual_norm, _skip_norm, _are_rows),
            RewriteRule(_residual_unshifted, _skip_norm, _are_rows),
            RewriteRule(_residual_rms, _skip_norm, _are_rows),
        ],
    ):
        RewriteRuleSet(rules, commute=True).apply_to_model(model)
    RemoveUnusedNodesPass()(model)
    model.opset_imports[_CONTRIB] = 1


def _bias_residual_norm(
    op: Any, hidden: Any, added: Any, bias: Any, weight: Any, shift: Any
) -> Any:
    total = op.Add(hidden, op.Add(added, bias))
    return op.LayerNormalization(total, weight, shift, _outputs=["norm"]), total


def _residual_norm(op: Any, hidden: Any, added: Any, weight: Any, shift: Any) -> Any:
    total = op.Add(hidden, added)
    return op.LayerNormalization(total, weight, shift, _outputs=["norm"]), total


def _residual_unshifted(op: Any, hidden: Any, added: Any, weight: Any) -> Any:
    total = op.Add(hidden, added)
    normed = op.LayerNormalization(total, weight, _allow_other_inputs=False, _outputs=["norm"])
    return normed, total


def _residual_rms(op: Any, hidden: Any, added: Any, weight: Any) -> Any:
    total = op.Add(hidden, added)
    return op.RMSNormalization(total, weight, _outputs=["norm"]), total


def _skip_norm(
    op: Any,
    hidden: Any,
    added: Any,
    weight: Any,
    norm: ir.Value,
    *,
    shift: Any = None,
    bias: Any = None,
) -> Any:
    node = _node_of(norm)
    kernel = op.SkipLayerNormalization
    if node.op_type == "RMSNormalization":
        kernel = op.SkipSimplifiedLayerNormalization
    further = [value for value in (shift, bias) if value is not None]
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    normed, _, _, total = kernel(
        added, hidden, weight, *further, epsilon=epsilon, _domain=_CONTRIB, _outputs=4
    )
    return normed, total


def _fused_gelu(op: Any, x: Any, bias: Any, gelu: ir.Value) -> Any:
    is_tanh = _node_of(gelu).attributes.get_string("approximate", "none") == "tanh"
    kind = op.FastGelu if is_tanh else op.BiasGelu
    return kind(x, bias, _domain=_CONTRIB)


def _one_row(op: Any, table: ir.Value, index: ir.Value, places: ir.Value) -> Any:
    rows = array_of(table)[array_of(index)]
    return op.Gather(op.initializer(ir.tensor(rows), name=f"{table.name}.rows"), places, axis=0)


def _are_tables(_: Any, table: ir.Value, index: ir.Value, **__: ir.Value) -> bool:
    return table.const_value is not None and index.const_value is not None


def _is_bias(_: Any, bias: ir.Value, **others: ir.Value) -> bool:
    """Only a vector of weights, added to rows of its width, is what the kernels take."""
    rows = [others[name] for name in ("hidden", "added", "x") if name in others]
    return rank_of(bias) == 1 and all(row.shape is not None and len(row.shape) > 1 for row in rows)


def _are_rows(_: Any, hidden: ir.Value, added: ir.Value, **__: ir.Value) -> bool:
    return hidden.shape is not None and hidden.shape == added.shape


def _node_of(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None, "the pattern has made it"
    return node
