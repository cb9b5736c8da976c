"""The graphs for draws: they draw what the sampler does, and a certificate sees if they do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from engine.cuda.sampling_calls import sampling_calls_of
from engine.errors import CertificateError
from engine.package.graph_io import SAMPLING_GRAPHS, check_graphs, sampling_shapes
from engine.requests.request import SamplingParams
from engine.sampling.logits import StepLogits
from engine.sampling.plain import SampledColumns, SamplingBatch, SamplingGraph, Scope
from engine.sampling.random_stream import RandomStream, SequenceDraws
from engine.sampling.sampler import Sampler
from engine.sampling.top_k import step_logits
from engine.session import create_session
from engine.slots.runner import SlotModelRunner
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.sampling_graphs import BLOCK, sampling_graphs
from exporter.prover import draws
from exporter.prover.draws import NUM_DRAWS, certify_draws
from exporter.prover.execution import load_for_cpu
from tests.engine.slots.test_model_runner import TinyModel

VOCAB = 700  # two blocks, the second of which is not full
LONG = pytest.mark.long
REACHES = pytest.mark.parametrize("kind", SamplingGraph, ids=lambda kind: kind.name.lower())


def write(directory: Path, vocab_size: int = VOCAB) -> list[Path]:
    write_graphs(sampling_graphs(vocab_size), directory)
    return [directory / name for name in SAMPLING_GRAPHS]


def test_their_inputs_and_outputs_are_those_of_the_contract(tmp_path: Path) -> None:
    paths = write(tmp_path)

    check_graphs(*zip(map(create_session, paths), sampling_shapes(VOCAB), strict=True))

    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(SAMPLING_GRAPHS)


def test_no_number_of_a_graph_is_for_nothing() -> None:
    for graph in sampling_graphs(VOCAB).values():
        assert all(value.uses() for value in graph.graph.initializers.values())


def drawn(
    path: Path, step: StepLogits, how: Sequence[SamplingParams]
) -> tuple[NDArray[np.int64], NDArray[np.float64], SamplingBatch]:
    """Return what a graph draws for each row of a step, and what it was asked."""
    rows, vocab_size = range(len(how)), step.logits.shape[1]
    streams = [SequenceDraws(row, 0) for row in rows]
    sampled = SampledColumns.of(rows, how, streams, vocab_size)
    plain = SamplingBatch(slice(len(how)), sampled, [1] * len(how))
    asked = plain.for_graph(RandomStream())
    assert asked is not None
    inputs: dict[str, Any] = {
        "top_ids": step.top_ids,
        "top_logits": step.top_logits,
        "top_logprobs": step.top_logprobs,
        "logits": step.logits,
        "scope": asked.scopes[:, None],
        "last_column": asked.how.num_columns[:, None] - 1,
        "temperature": asked.how.temperature,
        "top_p": asked.how.top_p[:, None],
        "least_score": asked.how.least,
        "uniform": asked.uniform[:, None],
    }
    session = create_session(path)
    found = session.run({name: inputs[name] for name in session.inputs})
    return found["drawn_ids"][:, 0], found["drawn_logprobs"][:, 0], plain


def random_params(rng: np.random.Generator, kind: SamplingGraph, k: int) -> SamplingParams:
    top_k = (
        int(rng.integers(1, k + 1)) if kind is SamplingGraph.COLUMNS or rng.random() < 0.2 else 0
    )
    has_share = top_k > 0 or (kind is SamplingGraph.NUCLEUS and k >= 128)
    return SamplingParams(
        "sampling",
        temperature=float(rng.choice([0.05, 0.3, 1, 1.7, 50])),
        top_k=top_k,
        top_p=float(rng.choice([0.1, 0.5, 0.9, 0.999, 1])) if has_share else 1.0,
        min_p=float(rng.choice([0, 0, 0.01, 0.1, 0.5, 1])) if top_k or k >= 128 else 0.0,
    )


def random_logits(rng: np.random.Generator, count: int, vocab_size: int) -> NDArray[np.float32]:
    """Return rows of logits from flat to steep ones, with many equals in every third row."""
    spread = rng.uniform(0.001, 5, (count, 1))
    logits = rng.normal(0, spread, (count, vocab_size)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    return logits


@pytest.mark.parametrize("vocab_size", [VOCAB, 2 * BLOCK, pytest.param(2500, marks=LONG)])
@pytest.mark.parametrize("k", [1, 23, 128, pytest.param(256, marks=LONG)])
@REACHES
def test_they_draw_what_the_sampler_draws(
    tmp_path: Path, kind: SamplingGraph, k: int, vocab_size: int
) -> None:
    rng = np.random.default_rng(100 * kind + k)
    count = 1000 if kind is SamplingGraph.COLUMNS else 300
    how = [random_params(rng, kind, k) for _ in range(count)]
    step = step_logits(random_logits(rng, count, vocab_size), k)

    ids, logprobs, plain = drawn(write(tmp_path, vocab_size)[kind], step, how)

    expected = Sampler().choose(step, plain)
    places = (step.top_ids == ids[:, None]).any(axis=1)
    assert not places.all() or kind is SamplingGraph.COLUMNS  # others may draw unlikely ones
    np.testing.assert_array_equal(ids, expected.token_ids)
    np.testing.assert_array_equal(logprobs, expected.logprobs)


def test_a_share_ends_within_equals_where_the_sampler_ends_it(tmp_path: Path) -> None:
    """All tokens are alike, or all but a few, so that a border lies among hundreds of them."""
    logits = np.zeros((200, VOCAB), np.float32)
    logits[1::2, 5:9] = 4
    how = [
        SamplingParams("sampling", top_p=top_p, temperature=temperature)
        for top_p in np.linspace(0.001, 0.999, 100)
        for temperature in (1.0, 1.3)
    ]
    step = step_logits(logits, 128)

    ids, _, plain = drawn(write(tmp_path)[SamplingGraph.NUCLEUS], step, how)

    assert ids.max() > 500
    np.testing.assert_array_equal(ids, Sampler().choose(step, plain).token_ids)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@REACHES
def test_a_row_that_is_not_finite_has_one_of_its_tokens(
    tmp_path: Path, kind: SamplingGraph, value: float
) -> None:
    logits = np.array([[2, 1, 0], [value] * 3, [value, 1, 0], [1, 0, value]], np.float32)
    asked = {
        "last_column": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "least_score": -9,
        "uniform": 0.9,
        "scope": Scope.GO_ON,
    }
    tops = {"top_ids": np.arange(12).reshape(4, 3), "top_logits": logits, "top_logprobs": logits}
    types = sampling_shapes(3)[kind].inputs
    session = create_session(write(tmp_path, 3)[kind])

    found = session.run(
        {
            **tops,
            **({"logits": logits} if kind else {}),
            **{n: np.full((4, 1), x, types[n].dtype) for n, x in asked.items() if n in types},
        }
    )

    ids = found["drawn_ids"][:, 0]
    if kind is SamplingGraph.COLUMNS:
        assert (ids // 3).tolist() == [0, 1, 2, 3]
        assert (ids % 3).max() <= 1
    else:
        assert 0 <= ids.min() <= ids.max() < 12


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


def stand(name: str, values: list[float]) -> Mutation:
    """Let a number of the graph be others."""

    def mutate(graph: onnx.GraphProto) -> None:
        found = next(one for one in graph.initializer if one.name == name)
        array = np.array(values, onnx.helper.tensor_dtype_to_np_dtype(found.data_type))
        found.CopyFrom(onnx.numpy_helper.from_array(array.reshape(found.dims), name))

    return mutate


OF_COLUMNS = {
    "no temperature": ignore("scores", "shifted"),
    "no top_p": ignore("may_be_drawn", "is_likely"),
    "no min_p": ignore("may_be_drawn", "is_inside"),
    "either of them": swap("may_be_drawn", "Or"),
    "a sum with the token itself": read("is_inside", 0, "sums"),
    "weights of what is not drawn": read("drawn_sums", 0, "weights"),
    "the middle": ignore("target", "drawn_total"),
    "a target in all weight": read("target", 0, "column_total"),
    "every column": read("drawn_total", 1, "zero"),
}
OF_ALL = {
    "no temperature of all": read("all_scores", 0, "all_shifted"),
    "no min_p of all": read("all_drawn", 0, "everything"),
    "the first block": ignore("row_block", "zero"),
    "the first of a block": ignore("row_place", "zero"),
    "a target from the first block on": ignore("row_left", "row_target"),
    "the middle of all": ignore("row_target", "row_total"),
    "always the likeliest columns": read("goes_on", 1, "nowhere"),
    "never the likeliest columns": read("goes_on", 1, "everywhere"),
    "whatever is asked": ignore("goes_on", "is_last_drawn"),
    "another id of all": read("row_logits", 1, "zero"),
    "a log-probability of the likeliest": ignore("row_logprobs", "best_logprobs"),
    "a wrong block": stand("block_size", [BLOCK - 1]),
    "a block without its end": stand("last_place", [BLOCK // 2]),
}
OF_NUCLEUS = {
    "no top_p of all": ignore("may_any_be_drawn", "are_likely"),
    "no min_p of a share": ignore("may_any_be_drawn", "are_in_nucleus"),
    "a share of the columns": ignore("total", "column_total"),
    "a share of all, tempered": ignore("total", "row_weight"),
    "a share of what is not tempered": ignore("row_weight", "own_total"),
    "no border": ignore("are_in_nucleus", "are_above"),
    "a quarter as many halvings": ignore("low_32", "low_8"),
    "weights not above the border": read("border_needed", 1, "all_total"),
    "a lowest score too high": ignore("low_0", "high_0"),
}
MUTATIONS = [
    pytest.param(kind, mutation, id=f"{kind}-{name}", marks=LONG if kind > first else ())
    for first, mutations in enumerate((OF_COLUMNS, OF_ALL, OF_NUCLEUS))
    for name, mutation in mutations.items()
    for kind in range(first, len(SamplingGraph))
]


def runner(directory: Path, *, has_encoder: bool) -> tuple[SlotModelRunner, TinyModel]:
    model = TinyModel(2, has_encoder=has_encoder, vocab_size=VOCAB)
    graphs = [create_session(directory / name, num_threads=1) for name in SAMPLING_GRAPHS]
    draws, paths = sampling_calls_of(graphs, VOCAB), model.write(directory)
    loaded = SlotModelRunner.load(model.contract, *paths, draws, num_slots=9, num_threads=1)
    return loaded, model


@pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder", "encoder-decoder"])
def test_a_certificate_draws_tokens_of_a_decode_call(tmp_path: Path, has_encoder: bool) -> None:
    write(tmp_path)
    loaded, model = runner(tmp_path, has_encoder=has_encoder)

    assert certify_draws(loaded, model.contract) >= NUM_DRAWS * len(SamplingGraph)


def test_most_draws_of_the_largest_graph_are_of_a_share_of_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    loaded, model = runner(tmp_path, has_encoder=False)
    asked: list[SamplingParams] = []
    monkeypatch.setattr(draws, "check_draws", lambda step, these: asked.extend(these.params))

    certify_draws(loaded, model.contract)

    of_share = [one for one in asked if one.top_k == 0 and one.top_p < 1]
    assert 2 * len(of_share) > NUM_DRAWS
    assert sum(one.min_p > 0 for one in of_share) > NUM_DRAWS / 8


def test_a_package_with_some_of_them_is_verified_as_it_is_served(tmp_path: Path) -> None:
    model = TinyModel(2, has_encoder=False, vocab_size=VOCAB)
    model.write(tmp_path)
    for path in write(tmp_path)[1:]:
        path.unlink()

    assert not load_for_cpu(model.contract, tmp_path, 1, 4).has_sampling_graphs


@pytest.mark.parametrize(("kind", "mutation"), MUTATIONS)
def test_a_certificate_refuses_draws_that_are_others(
    tmp_path: Path, kind: int, mutation: Mutation
) -> None:
    path = write(tmp_path)[kind]
    changed = onnx.load(path)
    made = [("Sub", ["last_column", "last_column"], "zero")]
    if kind:
        made += [
            ("Less", ["all_exponentials", "all_scores"], "nothing_likely"),
            ("Not", ["nothing_likely"], "everything"),
            ("Less", ["last_column", "zero"], "nowhere"),
            ("Not", ["nowhere"], "everywhere"),
        ]
    for op_type, inputs, output in made:
        changed.graph.node.append(onnx.helper.make_node(op_type, inputs, [output]))
    mutation(changed.graph)
    sort(changed.graph)
    onnx.save(changed, path)
    loaded, model = runner(path.parent, has_encoder=False)

    with pytest.raises(CertificateError, match="the graph draws .* the sampler"):
        certify_draws(loaded, model.contract)


def sort(graph: onnx.GraphProto) -> None:
    """Let every node stand behind those whose values it reads."""
    known = {value.name for value in (*graph.input, *graph.initializer)} | {""}
    left, done = list(graph.node), []
    while left:
        ready = [one for one in left if known.issuperset(one.input)]
        assert ready, "a value is made of itself"
        known.update(output for one in ready for output in one.output)
        done += ready
        left = [one for one in left if not known.issuperset(one.output)]
    del graph.node[:]
    graph.node.extend(done)
