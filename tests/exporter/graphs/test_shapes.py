"""Graphs without Shape give what they gave, and what they cannot do without it stays as it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from exporter.graphs.shapes import replace_shapes

LONGEST, D, VOCAB = 9, 16, 11
INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT


def constants(begins: int = 0) -> list[Any]:
    rng = np.random.default_rng(0)
    arrays = {
        "tokens": rng.normal(size=(VOCAB, D)).astype(np.float32),
        "table": rng.normal(size=(LONGEST, D)).astype(np.float32),
        "places": np.arange(LONGEST),
        "first": np.array([begins]),
        **{"axis": np.array([0]), "step": np.array([1])},
        **{"columns": np.array([1]), "heads": np.array([1, 2]), "last": np.array([4])},
        "none": np.zeros((1, 1, 1, LONGEST), bool),
    }
    return [numpy_helper.from_array(array, name) for name, array in arrays.items()]


def reader(begins: int = 0, *, masked_by: str = "mask_of_keys") -> ir.Model:
    """Return a graph of attention among the real tokens of texts, to which a table is added."""
    make = helper.make_node
    nodes = [
        make("Shape", ["input_ids"], ["length"], start=1, end=2),
        make("Slice", ["table", "first", "length", "axis", "step"], ["rows"]),
        make("Gather", ["tokens", "input_ids"], ["embedded"]),
        make("Add", ["embedded", "rows"], ["hidden"]),
        make("Slice", ["places", "first", "length", "axis", "step"], ["keys"]),
        make("Unsqueeze", ["lengths", "columns"], ["ends"]),
        make("Less", ["keys", "ends"], ["mask"]),
        make("Unsqueeze", ["mask", "heads"], ["mask_of_keys"]),
        make("Not", ["mask_of_keys"], ["mask_of_others"]),
        make("Unsqueeze", ["mask_of_keys", "last"], ["columns_of_keys"]),
        make("Shape", ["columns_of_keys"], ["size"], start=3),
        make("Expand", [masked_by, "size"], ["mask_of_all"]),
        make("Attention", ["hidden"] * 3 + ["mask_of_all"], ["y"], q_num_heads=2, kv_num_heads=2),
    ]
    info = helper.make_tensor_value_info
    inputs = [info("input_ids", INT64, ["batch", "tokens"]), info("lengths", INT64, ["batch"])]
    rows = ["tokens"] if begins == 0 else ["others"]
    known = [info("rows", FLOAT, [*rows, D]), info("keys", INT64, rows)]
    graph = helper.make_graph(
        nodes, "graph", inputs, [info("y", FLOAT, None)], constants(begins), value_info=known
    )
    opset = [helper.make_opsetid("", 24)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opset, ir_version=11))


def run(model: ir.Model, ids: np.ndarray, lengths: np.ndarray) -> Any:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(None, {"input_ids": ids, "lengths": lengths})[0]


def kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def without_shapes(model: ir.Model) -> ir.Model:
    replace_shapes(model)
    return model


@pytest.mark.parametrize("lengths", [[1], [9], [4, 4], [7, 1, 5], [9, 2]])
def test_tokens_attend_as_before_to_the_real_ones(lengths: list[int]) -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCAB, (len(lengths), max(lengths)))

    found = run(without_shapes(reader()), ids, np.array(lengths))

    np.testing.assert_allclose(found, run(reader(), ids, np.array(lengths)), atol=1e-6)


def test_no_shape_and_no_mask_is_left() -> None:
    left = kinds(without_shapes(reader()))

    assert not left.keys() & {"Shape", "Expand", "Less", "Slice"}
    assert left["CumSum"] == 1 and left["Gather"] == 3, "tokens, a row of them, and of the table"


def test_rows_from_a_later_one_on_are_sliced_as_before() -> None:
    found = kinds(without_shapes(reader(begins=1)))

    assert found == kinds(reader(begins=1))


def test_a_mask_of_something_else_stays() -> None:
    found = kinds(without_shapes(reader(masked_by="mask_of_others")))

    assert found["Expand"] == found["Shape"] == 1
    assert found["Slice"] == 0
