"""Inputs and outputs of graphs are described in one file, which whoever binds them asks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cuda.sampling_calls import sampling_calls_of
from engine.one_pass.batch import stack
from engine.one_pass.item_encoder import EncodedItem
from engine.package import graph_io
from engine.package.manifest import CacheShape, GenerationContract
from engine.requests.request import SamplingParams
from engine.sampling.plain import SamplingGraph, SamplingInputs
from engine.sampling.truncation import Truncations
from engine.slots.batch import Encode, PrefillChunk, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from tests.engine.cuda.fake_cuda import FakeCuda

CACHE = CacheShape(num_layers=1, num_kv_heads=1, max_len=8, head_dim=2)
CONTRACT = GenerationContract(
    vocab_size=5,
    num_heads=1,
    cache=CACHE,
    cross_cache=CACHE,
    decoder_start_token_id=0,
    eos_token_ids=(1,),
    alignment=True,
)


class ScriptedGraph:
    """Notes the types of all that is bound to it, and computes nothing; see Session."""

    path = Path("graph.onnx")

    def __init__(self, shape: graph_io.GraphShape) -> None:
        self.inputs, self.outputs = shape.inputs, shape.outputs
        self.bound: dict[str, str] = {}

    def bind(self) -> ScriptedGraph:
        return self

    def input(self, name: str, array: Any) -> None:
        assert self.bound.setdefault(name, str(array.dtype)) == str(array.dtype)

    output = input

    def run(self, graph_id: int) -> None:
        pass


@pytest.fixture
def other_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe every input and output with another type than it has."""
    others = {"int64": "int32", "int32": "int64", "float32": "float16", "float64": "float32"}
    for name, dtype in graph_io.DTYPES.items():
        monkeypatch.setitem(graph_io.DTYPES, name, others[dtype])


def literals(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_engine_types_no_input_of_a_graph_but_where_they_are_described() -> None:
    shapes = (graph_io.decoder_shape(CONTRACT), graph_io.encoder_shape(CACHE))
    names = {name for shape in shapes for name in shape.inputs}
    described = Path(graph_io.__file__)

    found = [
        f"{path.name}: {text}"
        for path in Path(engine.__path__[0]).rglob("*.py")
        if path != described
        for text in literals(path)
        if text in names
    ]

    assert found == []
    assert {"input_ids", "beam_rows", "alignment_idx"} <= names & set(literals(described))


@pytest.mark.usefixtures("other_types")
@pytest.mark.parametrize("is_on_device", [False, True])
def test_what_a_generating_model_is_bound_to_has_the_types_that_are_described(
    is_on_device: bool,
) -> None:
    shapes = (
        graph_io.decoder_shape(CONTRACT),
        graph_io.encoder_shape(CACHE),
        *graph_io.sampling_shapes(CONTRACT.vocab_size),
    )
    graphs = [ScriptedGraph(shape) for shape in shapes]
    decoder, encoder, *sampling_graphs = graphs
    how = Truncations.of([SamplingParams()], [2])
    draws = sampling_calls_of(sampling_graphs, CONTRACT.vocab_size)
    device = FakeCuda().device() if is_on_device else None
    runner = SlotModelRunner(CONTRACT, decoder, encoder, draws, num_slots=4, device=device)

    for kind, sources in zip(
        SamplingGraph, ((0, 1), (0, 0), (0, 1)), strict=True
    ):  # and beams of one
        runner.run(
            ScheduledBatch(
                encodes=(Encode(0, (2, 3)), Encode(1, (4, 2))),
                chunks=(PrefillChunk(2, (2, 3), 1, 1), PrefillChunk(3, (2,), 0, 1)),
                decode_ids=(2, 3),
                decode_sources=sources,
                num_top=2,
                aligned=(1, 2),
            ),
            SamplingInputs(np.array([1]), how, np.array([0.5]), np.array([2]), kind),
        )

    for graph, shape in zip(graphs, shapes, strict=True):
        described = {**shape.inputs, **shape.outputs}
        assert graph.bound == {name: value.dtype for name, value in described.items()}


@pytest.mark.usefixtures("other_types")
def test_what_a_one_pass_model_is_given_has_the_types_that_are_described() -> None:
    text = EncodedItem(np.arange(3), 3, 3, np.zeros(3, int))
    image = EncodedItem(np.zeros((1, 2, 2), np.float32), 0, 1)

    given = stack([text, text]) | stack([image])

    assert {name: str(array.dtype) for name, array in given.items()} == {
        name: graph_io.DTYPES[name] for name in given
    }
    assert len(given) == 4
