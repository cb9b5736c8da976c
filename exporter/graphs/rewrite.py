"""Cleans an exported graph: fewer nodes, each weight once, nothing about the machine it came from.

Every rule is exact: it moves data another way, or joins products of one input into one product.
A rule is a pair of functions, the nodes that are looked for and the nodes that take their place.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    NameFixPass,
    RemoveUnusedNodesPass,
)
from onnxscript.rewriter import RewriteRule, RewriteRuleSet

from exporter.graphs.constants import add_constant, array_of


def simplify(model: ir.Model) -> None:
    """Rewrite a graph in place."""
    # Rules are made anew, for they keep the last graph that they matched, with its weights.
    rules = RewriteRuleSet(
        [
            RewriteRule(  # `table[index]` comes out as GatherND
                lambda op, table, index: op.GatherND(
                    table, op.Unsqueeze(index, [-1]), batch_dims=0
                ),
                lambda op, table, index: op.Gather(table, index, axis=0),
            ),
            RewriteRule(  # `index_select` flattens an index that is flat already
                lambda op, table, index: op.Gather(
                    table, op.Reshape(index, [-1], _outputs=["flat"]), axis=0
                ),
                lambda op, table, index, **_: op.Gather(table, index, axis=0),
                lambda _, index, **__: index.shape is not None and len(index.shape) == 1,
            ),
            RewriteRule(_three_linears, _one_linear, _are_weights),
            RewriteRule(
                lambda op, x, wq, wk, wv: op.Concat(
                    op.MatMul(x, wq), op.MatMul(x, wk), op.MatMul(x, wv), axis=-1
                ),
                lambda op, x, wq, wk, wv: op.MatMul(
                    x, _joined(op, f"{x.name}.qkv_weight", wq, wk, wv)
                ),
                _are_weights,
            ),
            RewriteRule(_gate_and_up, _gate_with_up, _are_weights),
        ]
    )
    rules.apply_to_model(model)
    _state_shapes(model.graph)
    _repeat_masks(model.graph)
    RemoveUnusedNodesPass()(model)
    NameFixPass()(model)  # torch may give a node the name of one of our outputs
    ClearMetadataAndDocStringPass()(model)  # stack traces, with the paths of this machine


def _state_shapes(graph: ir.Graph) -> None:
    """Give every Reshape a constant shape where one says the same.

    A size that is the input's at the same place is 0, and one size may be left to be found: -1.
    """
    for node in graph:
        if node.op_type != "Reshape":
            continue
        data, shape = node.inputs
        assert data is not None and shape is not None
        given, wanted = data.shape, node.outputs[0].shape
        if shape.const_value is not None or given is None or wanted is None:
            continue
        sizes = []
        for size, same_place in zip(wanted, chain(given, repeat(None)), strict=False):
            if isinstance(size, int):
                sizes.append(size)
            else:
                sizes.append(0 if size == same_place and size.value is not None else -1)
        if sizes.count(-1) <= 1:
            value = add_constant(graph, f"{node.outputs[0].name}.shape", sizes)
            node.replace_input_with(1, value)
            node.attributes.pop("allowzero", None)


def _repeat_masks(graph: ir.Graph) -> None:
    """Give every query its row of a mask that has one for all: the kernel does not repeat rows.

    Torch's own attention makes such masks; ours does not.
    """
    for node in list(graph):
        if node.op_type != "Attention" or node.domain or len(node.inputs) < 4:
            continue
        query, mask = node.inputs[0], node.inputs[3]
        if query is None or mask is None or query.shape is None or mask.shape is None:
            continue
        if len(query.shape) == len(mask.shape) == 4 and mask.shape[2] == 1 != query.shape[2]:
            ones = add_constant(graph, f"{node.outputs[0].name}.ones", [1])
            length = ir.node("Shape", [query], {"start": 2, "end": 3})
            size = ir.node("Concat", [ones, ones, length.outputs[0], ones], {"axis": 0})
            rows = ir.node("Expand", [mask, size.outputs[0]])
            graph.insert_before(node, [length, size, rows])
            node.replace_input_with(3, rows.outputs[0])


# Query, key and value of one input: three products, packed by CachedAttention's input.
def _three_linears(op: Any, x: Any, wq: Any, wk: Any, wv: Any, bq: Any, bk: Any, bv: Any) -> Any:
    query = op.Add(op.MatMul(x, wq), bq)
    key = op.Add(op.MatMul(x, wk), bk)
    value = op.Add(op.MatMul(x, wv), bv)
    return op.Concat(query, key, value, axis=-1)


def _one_linear(op: Any, x: ir.Value, wq: Any, wk: Any, wv: Any, bq: Any, bk: Any, bv: Any) -> Any:
    product = op.MatMul(x, _joined(op, f"{x.name}.qkv_weight", wq, wk, wv))
    return op.Add(product, _joined(op, f"{x.name}.qkv_bias", bq, bk, bv))


# The two products of a gated feed-forward layer, the gate's through SiLU.
def _gate_and_up(op: Any, x: Any, wg: Any, wu: Any) -> Any:
    gate = op.MatMul(x, wg)
    return op.Mul(op.Mul(gate, op.Sigmoid(gate)), op.MatMul(x, wu))


def _gate_with_up(op: Any, x: ir.Value, wg: Any, wu: Any) -> Any:
    product = op.MatMul(x, _joined(op, f"{x.name}.gate_up_weight", wg, wu))
    gate, up = op.Split(product, axis=-1, num_outputs=2, _outputs=2)
    return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)


def _are_weights(context: Any, **values: ir.Value) -> bool:
    return all(value.const_value is not None for name, value in values.items() if name[0] in "wb")


def _joined(op: Any, name: str, *parts: ir.Value) -> ir.Value:
    # Named for the product's input, which is the layer's own: equal weights are stored once under
    # the name of one of them, so the parts' names do not tell two layers apart.
    array = np.concatenate([array_of(part) for part in parts], axis=-1)
    joined: ir.Value = op.initializer(ir.tensor(array), name=name)
    return joined
