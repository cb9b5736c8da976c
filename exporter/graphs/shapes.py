"""Does without Shape, by which a graph asks the host how many tokens there are.

| nodes                                                 | become                              |
|-------------------------------------------------------|-------------------------------------|
| Slice: as many first rows of a table as there are ids | Gather: the rows 0, 1, 2, ... of it |
| Expand of the mask of a text's end, for Attention     | the lengths, which Attention takes  |

The places 0, 1, 2, ... are counted on the device: sums of ones, of which an input has as many.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from engine.package.graph_io import INPUT_IDS, LENGTHS

_MASK, _KEY_LENGTHS = 3, 6  # inputs of Attention


def replace_shapes(model: ir.Model) -> None:
    """Rewrite a graph in place."""
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    if INPUT_IDS not in inputs:
        return
    slices = list(_first_rows(graph, inputs[INPUT_IDS]))
    if not slices:
        return
    places = _count(graph, inputs[INPUT_IDS])
    _look_up(graph, slices, places)
    if LENGTHS in inputs:
        _tell_lengths(graph, places, inputs[LENGTHS])
    RemoveUnusedNodesPass()(model)


def _first_rows(graph: ir.Graph, ids: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes that take as many rows of a table, from its first on, as there are tokens."""
    for node in graph:
        if node.op_type != "Slice":
            continue
        table, starts, ends, axes, steps = (*node.inputs, None, None)[:5]
        is_table = table is not None and table.const_value is not None
        if is_table and _is_length(ends, ids) and _numbers(starts) == _numbers(axes) == [0]:
            if steps is None or _numbers(steps) == [1]:
                yield node


def _is_length(value: ir.Value | None, ids: ir.Value) -> bool:
    """Return whether a value is the second size of ids, or of another input that has it."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Shape":
        return False
    (given,) = node.inputs
    axes = {name: attribute.as_int() for name, attribute in node.attributes.items()}
    if given is None or not given.is_graph_input() or axes != {"start": 1, "end": 2}:
        return False
    assert given.shape is not None and ids.shape is not None, "inputs have shapes"
    return given.shape[1] == ids.shape[1]


def _count(graph: ir.Graph, ids: ir.Value) -> ir.Value:
    """Add nodes that count the places [S] of ids [B, S]; return these."""
    zero, one = (_scalar(graph, f"places.{number}", number) for number in (0, 1))
    row = ir.node("Gather", [ids, zero], {"axis": 0})
    ones = ir.node("Clip", [row.outputs[0], one, one])
    places = ir.node("CumSum", [ones.outputs[0], zero], {"exclusive": 1})
    graph.insert_before(graph[0], [row, ones, places])
    return places.outputs[0]


def _look_up(graph: ir.Graph, slices: list[ir.Node], places: ir.Value) -> None:
    """Take the rows at these places instead, of each table once."""
    rows: dict[ir.Value, ir.Value] = {}
    for node in slices:
        table, sliced = node.inputs[0], node.outputs[0]
        assert table is not None, "it is there to be sliced"
        if table not in rows:
            rows[table] = places
            if not _counts(table):
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


def _counts(table: ir.Value) -> bool:
    """Return whether every row of a constant is the number of its place."""
    assert table.const_value is not None, "it is a constant"
    array = table.const_value.numpy()
    return np.array_equal(array, np.arange(len(array)))


def _numbers(value: ir.Value | None) -> list[int]:
    """Return the numbers of a constant; of what is computed, none."""
    constant = None if value is None else value.const_value
    return [] if constant is None else constant.numpy().reshape(-1).tolist()


def _scalar(graph: ir.Graph, name: str, number: int) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(np.array(number), name=name))
    value.shape, value.dtype = ir.Shape([]), ir.DataType.INT64
    graph.register_initializer(value)
    return value
