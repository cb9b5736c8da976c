"""Joins the products by which an encoder makes queries, keys and values of one input.

| nodes                              | become                              |
|------------------------------------|-------------------------------------|
| three products of one input        | one product, cut in three           |
| the same with three biases         | one product, one bias, cut in three |

They are of one width. A decoder's are one product anyway, for its operator takes them packed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from exporter.graphs.constants import add_constant, array_of, rank_of

_PARTS = 3


def join_products(model: ir.Model) -> None:
    """Rewrite a graph in place."""
    products: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        x, weight = (*node.inputs, None, None)[:2]
        if node.op_type == "MatMul" and x is not None and rank_of(weight) == 2:
            products[x].append(node)
    for nodes in products.values():
        widths = {array_of(node.inputs[1]).shape for node in nodes}
        if len(nodes) == _PARTS and len(widths) == 1:
            _join(model.graph, nodes)
    RemoveUnusedNodesPass()(model)


def _join(graph: ir.Graph, products: Sequence[ir.Node]) -> None:
    """Put one product in the place of three, unless only some have a bias, or are outputs."""
    x = products[0].inputs[0]
    assert x is not None, "it is what they share"
    sums = [found for node in products if (found := sum_of(node)) is not None]
    name, parts = f"{x.name}.parts", sums or products
    if len(parts) < _PARTS or any(part.outputs[0].is_graph_output() for part in parts):
        return
    nodes = [ir.node("MatMul", [x, _joined(graph, f"{name}.weight", products)])]
    if sums:
        bias = _joined(graph, f"{name}.bias", sums)
        nodes.append(ir.node("Add", [nodes[0].outputs[0], bias]))
    for node in nodes:
        old = parts[0].outputs[0]
        node.outputs[0].type = old.type
        if old.shape is not None:
            width = array_of(node.inputs[1]).shape[-1]
            node.outputs[0].shape = ir.Shape((*old.shape[:-1], width))
    cut = {"axis": -1, "num_outputs": _PARTS}
    nodes.append(ir.node("Split", [nodes[-1].outputs[0]], cut, num_outputs=_PARTS))
    graph.insert_before(products[0], nodes)
    for old, new in zip((node.outputs[0] for node in parts), nodes[-1].outputs, strict=True):
        new.shape, new.type = old.shape, old.type
        old.replace_all_uses_with(new)


def sum_of(product: ir.Node) -> ir.Node | None:
    """Return the node that adds a bias to a product, and alone reads it; None if there is none."""
    uses = product.outputs[0].uses()
    if len(uses) != 1:
        return None
    ((node, place),) = uses
    return node if node.op_type == "Add" and place == 0 and rank_of(node.inputs[1]) == 1 else None


def _joined(graph: ir.Graph, name: str, nodes: Sequence[ir.Node]) -> ir.Value:
    """Add a constant: the second inputs of the nodes side by side."""
    parts = [array_of(node.inputs[1]) for node in nodes]
    return add_constant(graph, name, np.concatenate(parts, axis=-1))
