"""Three products of one input in one node give what they gave."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from exporter.graphs.joined_products import join_products

D, N = 24, 16
FLOAT = TensorProto.FLOAT


def products(widths: tuple[int, ...], num_biases: int, *, read: bool = True) -> ir.Model:
    """Return a graph of products of x, some with a bias, each read by a node of its own."""
    rng = np.random.default_rng(0)
    nodes, stored, outputs = [], [], []
    for i, width in enumerate(widths):
        names = [f"product{i}", f"sum{i}"][: 1 + (i < num_biases)]
        arrays = {f"matrix{i}": rng.normal(size=(D, width)), f"bias{i}": rng.normal(size=width)}
        stored += [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
        nodes.append(helper.make_node("MatMul", ["x", f"matrix{i}"], [names[0]]))
        if len(names) > 1:
            nodes.append(helper.make_node("Add", [names[0], f"bias{i}"], [names[1]]))
        outputs.append(f"y{i}" if read else names[-1])
        if read:
            nodes.append(helper.make_node("Relu", [names[-1]], [f"y{i}"]))
    info = helper.make_tensor_value_info
    given = [info("x", FLOAT, ["B", "S", D])]
    taken = [info(name, FLOAT, ["B", "S", n]) for name, n in zip(outputs, widths, strict=True)]
    graph = helper.make_graph(nodes, "graph", given, taken, stored)
    opset = [helper.make_opsetid("", 23)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opset, ir_version=10))


def joined(model: ir.Model) -> ir.Model:
    join_products(model)
    return model


def kinds(model: ir.Model) -> list[str]:
    return sorted(node.op_type for node in model.graph)


def run(model: ir.Model, x: np.ndarray) -> list[Any]:
    return ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"x": x})


@pytest.mark.parametrize("num_biases", [0, 3])
def test_three_products_of_one_input_are_one(num_biases: int) -> None:
    x = np.random.default_rng(1).normal(size=(2, 5, D)).astype(np.float32)

    model = joined(products((N, N, N), num_biases))

    assert kinds(model) == ["Add"] * (num_biases > 0) + ["MatMul", "Relu", "Relu", "Relu", "Split"]
    expected = run(products((N, N, N), num_biases), x)
    np.testing.assert_allclose(run(model, x), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("widths", "num_biases", "read"),
    [
        ((N, N), 2, True),
        ((N, N, N, N), 4, True),
        ((N, N, 8), 3, True),
        ((N, N, N), 2, True),
        ((N, N, N), 3, False),
    ],
    ids=["two", "four", "of several widths", "not all with a bias", "outputs of the graph"],
)
def test_other_products_stay_apart(widths: tuple[int, ...], num_biases: int, read: bool) -> None:
    model = products(widths, num_biases, read=read)

    assert kinds(joined(model)) == kinds(products(widths, num_biases, read=read))
