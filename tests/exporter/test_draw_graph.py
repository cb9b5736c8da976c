"""The graph for draws: it draws what the sampler does, and a certificate sees if it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from engine.errors import CertificateError
from engine.package.graph_io import DRAW_GRAPH, check_graphs, draw_shape
from engine.sampling.sampler import drawn_columns
from engine.sampling.truncation import Truncations
from engine.session import create_session
from engine.slots.runner import SlotModelRunner
from exporter.certificate.draws import NUM_DRAWS, certify_draws
from exporter.graphs.draw_graph import draw_graph
from exporter.graphs.package_graphs import write_graphs
from tests.engine.test_model_runner import TinyModel


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_graphs({DRAW_GRAPH: draw_graph()}, tmp_path)
    return tmp_path / DRAW_GRAPH


def test_its_inputs_and_outputs_are_those_of_the_contract(path: Path) -> None:
    check_graphs((create_session(path), draw_shape()))

    assert [file.name for file in path.parent.iterdir()] == [DRAW_GRAPH]


@pytest.mark.parametrize("k", [1, 23, 128, 256])
def test_it_draws_what_the_sampler_draws(path: Path, k: int) -> None:
    rng, n = np.random.default_rng(k), 3000
    spread = rng.uniform(0.01, 5, (n, 1))
    logits = -np.sort(-rng.normal(0, spread, (n, k)).astype(np.float32), axis=1)
    ids = np.argsort(rng.random((n, k)), axis=1)
    how = Truncations(
        rng.integers(1, k + 1, n),
        rng.choice([0.05, 0.3, 1, 1.7, 50], (n, 1)).astype(np.float32),
        rng.choice([0.1, 0.5, 0.9, np.inf], n),
        np.log(rng.choice([0.01, 0.1, 0.5, 1], (n, 1))).astype(np.float32),
    )
    how.least[::2] = -np.inf
    uniform = rng.random(n)

    found = create_session(path).run(
        {
            "top_ids": ids,
            "top_logits": logits,
            "top_logprobs": logits - 5,
            "last_column": how.num_columns[:, None] - 1,
            "temperature": how.temperature,
            "top_p": how.top_p[:, None],
            "least_score": how.least,
            "uniform": uniform[:, None],
        }
    )

    columns, _ = drawn_columns(logits, np.arange(n), np.full(n, np.nan), uniform, how)
    assert (columns > 0).any() == (k > 1)
    np.testing.assert_array_equal(found["drawn_ids"], ids[np.arange(n), columns][:, None])
    np.testing.assert_array_equal(found["drawn_logprobs"][:, 0], logits[np.arange(n), columns] - 5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_one_of_its_likeliest_tokens(path: Path, value: float) -> None:
    logits = np.array([[2, 1, 0], [value] * 3, [value, 1, 0], [1, 0, value]], np.float32)
    asked = {"last_column": 1, "temperature": 0.5, "top_p": 0.9, "least_score": -9, "uniform": 0.9}
    types = draw_shape().inputs

    found = create_session(path).run(
        {
            "top_ids": np.arange(12).reshape(4, 3),
            "top_logits": logits,
            "top_logprobs": logits,
            **{name: np.full((4, 1), x, types[name].dtype) for name, x in asked.items()},
        }
    )

    assert (found["drawn_ids"][:, 0] // 3).tolist() == [0, 1, 2, 3]
    assert (found["drawn_ids"][:, 0] % 3).max() <= 1


Mutation = Callable[[onnx.GraphProto], None]


def node(graph: onnx.GraphProto, output: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.output[0] == output)


def ignore(output: str, value: str) -> Mutation:
    """Let a value be what one of its inputs is."""

    def mutate(graph: onnx.GraphProto) -> None:
        found = node(graph, output)
        found.CopyFrom(onnx.helper.make_node("Identity", [value], [output]))

    return mutate


def swap(output: str, op_type: str) -> Mutation:
    def mutate(graph: onnx.GraphProto) -> None:
        node(graph, output).op_type = op_type

    return mutate


def read(output: str, position: int, value: str) -> Mutation:
    def mutate(graph: onnx.GraphProto) -> None:
        node(graph, output).input[position] = value

    return mutate


MUTATIONS = {
    "no temperature": ignore("scores", "shifted"),
    "no top_p": ignore("may_be_drawn", "is_likely"),
    "no min_p": ignore("may_be_drawn", "is_inside"),
    "either of them": swap("may_be_drawn", "Or"),
    "a sum with the token itself": read("is_inside", 0, "sums"),
    "weights of what is not drawn": read("drawn_sums", 0, "weights"),
    "the middle": ignore("target", "drawn_total"),
    "a target in all weight": read("target", 0, "total"),
    "every column": read("drawn_total", 1, "zero"),
    "another id": read("drawn_ids", 1, "zero"),
    "another log-probability": read("drawn_logprobs", 1, "zero"),
}


def runner(directory: Path, *, has_encoder: bool) -> tuple[SlotModelRunner, TinyModel]:
    model = TinyModel(2, has_encoder=has_encoder)
    paths = *model.write(directory), directory / DRAW_GRAPH
    return SlotModelRunner.load(model.contract, *paths, num_slots=9, num_threads=1), model


@pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder", "encoder-decoder"])
def test_a_certificate_draws_tokens_of_a_decode_call(path: Path, has_encoder: bool) -> None:
    loaded, model = runner(path.parent, has_encoder=has_encoder)

    assert certify_draws(loaded, model.contract) >= NUM_DRAWS


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_certificate_refuses_draws_that_are_others(path: Path, name: str) -> None:
    changed = onnx.load(path)
    zero = onnx.helper.make_node("Sub", ["last_column", "last_column"], ["zero"])
    changed.graph.node.insert(0, zero)
    MUTATIONS[name](changed.graph)
    onnx.save(changed, path)
    loaded, model = runner(path.parent, has_encoder=False)

    with pytest.raises(CertificateError, match="the graph draws .* the sampler"):
        certify_draws(loaded, model.contract)
