"""Reductions in other operators: the same numbers, and none is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from exporter.graphs.reductions import replace_reductions

TYPES: dict[type[Any], int] = {
    np.float32: TensorProto.FLOAT,
    np.float16: TensorProto.FLOAT16,
}


def reduction(kind: str, axis: int, dtype: type[Any], rank: int, keepdims: int) -> ir.Model:
    """Return a graph of one reduction of x to y."""
    x = helper.make_tensor_value_info("x", TYPES[dtype], [f"size_{i}" for i in range(rank)])
    y = helper.make_tensor_value_info("y", TYPES[dtype], None)
    axes = numpy_helper.from_array(np.array([axis]), "axes")
    node = helper.make_node(kind, ["x", "axes"], ["y"], keepdims=keepdims)
    graph = helper.make_graph([node], "graph", [x], [y], [axes])
    opset = [helper.make_opsetid("", 23)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opset, ir_version=10))


def run(model: ir.Model, x: np.ndarray) -> Any:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(None, {"x": x})[0]


def replaced(model: ir.Model) -> ir.Model:
    replace_reductions(model)
    assert not [node.op_type for node in model.graph if node.op_type.startswith("Reduce")]
    return model


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("axis", "shape"), [(-1, (5, 48)), (2, (2, 3, 48))])
def test_a_length_is_the_root_of_a_product(
    axis: int, shape: tuple[int, ...], dtype: type[Any]
) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    x[0] = 0
    x[1] *= 200 / np.abs(x[1]).max()  # its squares are beyond float16

    found = run(replaced(reduction("ReduceL2", axis, dtype, len(shape), keepdims=1)), x)

    wanted = np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)
    assert found.dtype == dtype and found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=float(np.finfo(dtype).eps))


def test_a_length_does_not_depend_on_the_rows_beside() -> None:
    x = np.random.default_rng(0).normal(size=(37, 771)).astype(np.float32)
    model = replaced(reduction("ReduceL2", -1, np.float32, 2, keepdims=1))

    together = run(model, x)

    assert (together == np.vstack([run(model, row[None]) for row in x])).all()


def test_a_maximum_is_the_first_of_the_largest() -> None:
    x = np.random.default_rng(0).normal(size=(4, 9, 6)).astype(np.float32)
    x[2, 3:] = np.finfo(np.float32).min

    found = run(replaced(reduction("ReduceMax", 1, np.float32, 3, keepdims=0)), x)

    assert (found == x.max(axis=1)).all()
