"""Does without Shape, by which a graph asks the host how many tokens there are.

| nodes                                                 | become                              |
|-------------------------------------------------------|-------------------------------------|
| Slice: as many first rows of a table as there are ids | Gather: the rows 0, 1, 2, ... of it |
| Expand of the mask of a text's end, for Attention     | the lengths, which Attention takes  |

The places 0, 1, 2, ... are counted on the device: sums of ones, of which an input has as many.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from engine.package.graph_io import INPUT_IDS, LENGTHS
from exporter.graphs.constants import add_constant, array_of, integers_of

_MASK, _KEY_LENGTHS = 3, 6  # inputs of Attention


def replace_shapes(model: ir.Model) -> None:
    """Rewrite a graph in place."""
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    ids = inputs.get(INPUT_IDS)
    if ids is None:
        return
    slices = [node for node in graph if _takes_first_rows(node, ids)]
    if not slices:
        return
    zero, one = (add_constant(graph, f"places.{number}", number) for number in (0, 1))
    row = ir.node("Gather", [ids, zero], {"axis": 0})
    ones = ir.node("Clip", [row.outputs[0], one, one])
    count = ir.node("CumSum", [ones.outputs[0], zero], {"exclusive": 1})
    graph.insert_before(graph[0], [row, ones, count])
    places = count.outputs[0]  # [S]
    _look_up(graph, slices, places)
    if LENGTHS in inputs:
        _tell_lengths(graph, places, inputs[LENGTHS])
    RemoveUnusedNodesPass()(model)


def _takes_first_rows(node: ir.Node, ids: ir.Value) -> bool:
    """Return whether a node takes as many rows of a table, from its first on, as there are ids."""
    if node.op_type != "Slice":
        return False
    table, starts, ends, axes, steps = (*node.inputs, None, None)[:5]
    shape = None if ends is None else ends.producer()
    if table is None or table.const_value is None or shape is None or shape.op_type != "Shape":
        return False
    if not integers_of(starts) == integers_of(axes) == [0]:
        return False
    if steps is not None and integers_of(steps) != [1]:
        return False
    (given,) = shape.inputs  # the ids, or another input that has their length
    bounds = {name: attribute.as_int() for name, attribute in shape.attributes.items()}
    if given is None or not given.is_graph_input() or bounds != {"start": 1, "end": 2}:
        return False
    assert given.shape is not None and ids.shape is not None, "inputs have shapes"
    return given.shape[1] == ids.shape[1]


def _look_up(graph: ir.Graph, slices: list[ir.Node], places: ir.Value) -> None:
    """Take the rows at these places instead, of each table once; a table may count them itself."""
    rows: dict[ir.Value, ir.Value] = {}
    for node in slices:
        table, sliced = node.inputs[0], node.outputs[0]
        assert table is not None, "it is there to be sliced"
        if table not in rows:
            rows[table] = places
            array = array_of(table)
            if not np.array_equal(array, np.arange(len(array))):
                gather = ir.node("Gather", [table, places], {"axis": 0})
                graph.insert_before(node, gather)
                rows[table] = gather.outputs[0]
        rows[table].shape, rows[table].type = sliced.shape, sliced.type
        sliced.replace_all_uses_with(rows[table])


def _tell_lengths(graph: ir.Graph, places: ir.Value, lengths: ir.Value) -> None:
    """Give Attention the lengths in place of a mask that is made of nothing else."""
    for node in graph:
        if node.op_type != "Attention" or node.domain or len(node.inputs) <= _MASK:
            continue
        mask = _source(node.inputs[_MASK], "Expand", "Unsqueeze")
        less = None if mask is None else mask.producer()
        if less is None or less.op_type != "Less":
            continue
        if less.inputs[0] is places and _source(less.inputs[1], "Unsqueeze") is lengths:
            node.resize_inputs(_KEY_LENGTHS + 1)
            node.replace_input_with(_MASK, None)
            node.replace_input_with(_KEY_LENGTHS, lengths)


def _source(value: ir.Value | None, *kinds: str) -> ir.Value | None:
    """Return what a value was before nodes of these kinds, which repeat it or give it axes."""
    while value is not None:
        node = value.producer()
        if node is None or node.op_type not in kinds:
            break
        value = node.inputs[0]
    return value
