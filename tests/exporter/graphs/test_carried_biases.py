"""A product behind a norm that carries its bias gives what it gave, with a node less."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from exporter.graphs.fuse import fuse

D, N = 64, 48
TYPES: dict[type[Any], int] = {
    np.float32: TensorProto.FLOAT,
    np.float16: TensorProto.FLOAT16,
}
Weights = dict[str, np.ndarray]


def draw(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.normal(1, 0.5, D),
        "shift": rng.normal(0, 0.5, D),
        "matrix": rng.normal(0, 0.2, (D, N)),
        "bias": rng.normal(0, 0.5, N),
    }


def graph(weights: Weights, dtype: type[Any], num_products: int = 1) -> ir.Model:
    """Return a norm of x, and products of it to y0, y1, ..., each with the bias."""
    nodes = [helper.make_node("LayerNormalization", ["x", "weight", "shift"], ["normed"])]
    for i in range(num_products):
        nodes += [
            helper.make_node("MatMul", ["normed", "matrix"], [f"product{i}"]),
            helper.make_node("Add", [f"product{i}", "bias"], [f"y{i}"]),
        ]
    x = helper.make_tensor_value_info("x", TYPES[dtype], ["B", "S", D])
    outputs = [
        helper.make_tensor_value_info(f"y{i}", TYPES[dtype], ["B", "S", N])
        for i in range(num_products)
    ]
    stored = [numpy_helper.from_array(array.astype(dtype), k) for k, array in weights.items()]
    opset = [helper.make_opsetid("", 23)]
    made = helper.make_graph(nodes, "graph", [x], outputs, stored)
    return ir.from_proto(helper.make_model(made, opset_imports=opset, ir_version=10))


def run(model: ir.Model, x: np.ndarray) -> Any:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(None, {"x": x})[0]


def fused(model: ir.Model) -> ir.Model:
    fuse(model)
    return model


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def rows(dtype: type[Any]) -> np.ndarray:
    x = np.random.default_rng(1).normal(3, 2, (2, 5, D))
    x[0, 1, 7] = 200  # as trained models have them
    x[1, 0] = 4  # nothing is left of it without its mean
    return x.astype(dtype)


def test_a_product_behind_a_norm_carries_its_bias() -> None:
    weights, x = draw(), rows(np.float32)
    weights["matrix"][:, 5], weights["bias"][5] = 0, 0  # a head that was widened

    found = fused(graph(weights, np.float32))

    assert kinds(found) == ["LayerNormalization", "MatMul"]
    expected = run(graph(weights, np.float32), x)
    np.testing.assert_allclose(run(found, x), expected, atol=2e-5)
    assert np.abs(run(found, x)[..., 5]).max() < 1e-6


def test_in_half_precision_no_more_is_lost_than_before() -> None:
    before, after = [], []
    for seed in range(8):
        weights, x = draw(seed), rows(np.float16)
        halves = {name: array.astype(np.float16) for name, array in weights.items()}
        exact = run(graph(halves, np.float32), x.astype(np.float32))
        before.append(run(graph(weights, np.float16), x) - exact)
        after.append(run(fused(graph(weights, np.float16)), x) - exact)

    assert np.square(after).mean() < 1.5**2 * np.square(before).mean()


def test_in_half_precision_weights_that_are_rounded_already_carry_the_same_bias() -> None:
    weights = {"weight": np.ones(D), "shift": np.zeros(D), "bias": np.zeros(N)}
    weights["matrix"] = np.random.default_rng(0).normal(0, 0.02, (D, N)).astype(np.float16)
    nothing = np.full((1, 1, D), 4, np.float16)  # is left of it without its mean

    found = run(fused(graph(weights, np.float16)), nothing)

    assert np.abs(found).max() < 1e-5  # 6e-5 if each weight were rounded by itself


def test_a_bias_that_would_dwarf_the_weights_is_added_as_before() -> None:
    weights = draw()
    weights["bias"][3] = 300

    assert kinds(fused(graph(weights, np.float16))) == ["LayerNormalization", "MatMul", "Add"]


def test_a_norm_that_others_read_stays_as_it_is() -> None:
    model = graph(draw(), np.float32, num_products=2)
    before = kinds(model)

    assert kinds(fused(model)) == before


@pytest.mark.parametrize("name", ["weight", "shift", "matrix", "bias"])
def test_what_is_computed_is_no_weight(name: str) -> None:
    model = graph(draw(), np.float32)
    value = model.graph.initializers.pop(name)
    value.const_value = None
    model.graph.inputs.append(value)
    before = kinds(model)

    assert kinds(fused(model)) == before
