"""A package that fails at any kind of call is refused before anybody is served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from engine.errors import PackageError
from engine.sampling.logits import StepLogits
from engine.sampling.plain import SamplingInputs
from engine.slots.batch import ScheduledBatch
from engine.slots.invariance import rows_are_bit_equal
from engine.slots.runner import SlotModelRunner
from engine.slots.warm_up import warm_up
from tests.engine.slots.test_model_runner import VOCAB, WIDTH, TinyModel

Change = Callable[[onnx.GraphProto], None]

WIDEST = 16  # sequences of a request


def _add(graph: onnx.GraphProto, op: str, inputs: list[str], output: str, **options: object) -> str:
    """Put a node in front of all others."""
    graph.node.insert(0, helper.make_node(op, inputs, [output], **options))
    return output


def _constant(graph: onnx.GraphProto, name: str, value: object, dtype: type = np.int64) -> str:
    graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
    return name


def _read_instead(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        if new not in node.output:
            node.input[:] = [new if name == old else name for name in node.input]


def _write_behind(
    graph: onnx.GraphProto, output: str, op: str, operand: str, **options: object
) -> None:
    """Change an output, for callers only."""
    for node in graph.node:
        node.output[:] = [f"raw_{output}" if name == output else name for name in node.output]
        node.input[:] = [f"raw_{output}" if name == output else name for name in node.input]
    graph.node.append(helper.make_node(op, [f"raw_{output}", operand], [output], **options))


def _nan(graph: onnx.GraphProto) -> None:
    _write_behind(graph, "logits", "Add", _constant(graph, "nan", np.nan, np.float32))


def _infinite_logprobs(graph: onnx.GraphProto) -> None:
    _write_behind(graph, "top_logprobs", "Sub", _constant(graph, "inf", np.inf, np.float32))


def _ids_out_of_vocabulary(graph: onnx.GraphProto) -> None:
    _write_behind(graph, "top_ids", "Add", _constant(graph, "vocab", VOCAB))


def _one_position_only(graph: onnx.GraphProto) -> None:
    ends = [_constant(graph, f"end_{i}", [i]) for i in (0, 1)]
    _read_instead(graph, "logit_idx", _add(graph, "Slice", ["logit_idx", *ends], "first_idx"))


def _one_row_only(graph: onnx.GraphProto) -> None:
    flat = _constant(graph, "one_row", [1, -1])
    _read_instead(graph, "input_ids", _add(graph, "Reshape", ["input_ids", flat], "flat_ids"))


def _best_only(graph: onnx.GraphProto) -> None:
    _read_instead(graph, "num_top", _constant(graph, "one", [1]))


def _small_vocabulary(graph: onnx.GraphProto) -> None:
    (table,) = (weight for weight in graph.initializer if [*weight.dims] == [VOCAB, WIDTH])
    table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table)[:-1], table.name))


def _one_beam_only(graph: onnx.GraphProto) -> None:
    group = _constant(graph, "alone", [-1, 1])
    _read_instead(graph, "beam_rows", _add(graph, "Reshape", ["beam_rows", group], "no_groups"))


def _one_source_only(graph: onnx.GraphProto) -> None:
    flat = _constant(graph, "one_source", [1, -1])
    _read_instead(graph, "input_ids", _add(graph, "Reshape", ["input_ids", flat], "flat_ids"))


DECODER_FAULTS: list[tuple[Change, str]] = [
    (_nan, "a prompt of 4 tokens with one position wanted failed: logits are not finite"),
    (_infinite_logprobs, "top_logprobs are not finite"),
    (_ids_out_of_vocabulary, "top_ids are .*the vocabulary is 0 to 22"),
    (_one_position_only, "a prompt of 4 tokens with all positions wanted failed"),
    (_one_row_only, "decoding 3 rows failed"),
    (_best_only, r"output top_logits is float32 \[N, 1\]"),
    (_small_vocabulary, "a prompt of 4 tokens with one position wanted failed"),
]


def _load(
    model: TinyModel, directory: Path, decoder: Change | None = None, encoder: Change | None = None
) -> SlotModelRunner:
    paths = model.write(directory)
    for path, change in zip(paths, (decoder, encoder), strict=True):
        if path is not None and change is not None:
            graph = onnx.load(path)
            change(graph.graph)
            onnx.save(graph, path)
    return SlotModelRunner.load(model.contract, *paths, num_slots=5, num_threads=1)


@pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder", "encoder-decoder"])
@pytest.mark.parametrize(
    ("fault", "message"), DECODER_FAULTS, ids=[f.__name__[1:] for f, _ in DECODER_FAULTS]
)
def test_a_decoder_that_fails_at_a_kind_of_call_is_refused(
    tmp_path: Path, fault: Change, message: str, has_encoder: bool
) -> None:
    model = TinyModel(1, has_encoder=has_encoder)

    with pytest.raises(PackageError, match=message):  # when it is loaded, or when it runs
        warm_up(_load(model, tmp_path, decoder=fault), model.contract, "package")


def test_a_decoder_that_cannot_share_a_source_is_refused(tmp_path: Path) -> None:
    model = TinyModel(1, has_encoder=True)
    runner = _load(model, tmp_path, decoder=_one_beam_only)

    with pytest.raises(PackageError, match="decoding 2 sequences of one source failed"):
        warm_up(runner, model.contract, "package")


@pytest.mark.parametrize(
    ("num_slots", "widths"), [(1, []), (2, [2]), (5, [2, 4, 5]), (20, [2, 4, 8, 16])]
)
def test_as_many_sequences_share_a_source_as_a_request_may_ask_for(
    tmp_path: Path, num_slots: int, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyModel(1, has_encoder=True)
    runner = SlotModelRunner.load(
        model.contract, *model.write(tmp_path), num_slots=num_slots, num_threads=1
    )
    shared: list[int] = []

    def run(batch: ScheduledBatch, draws: SamplingInputs | None = None) -> StepLogits:
        shared.append(Counter(batch.decode_sources)[0])
        return SlotModelRunner.run(runner, batch)

    monkeypatch.setattr(runner, "run", run)

    warm_up(runner, model.contract, "package")

    assert [width for width in shared if width > 1] == widths


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_one_source_only, r"present_cross_key_values.0.key and 3 like it is float32 \[1, "),
        (_small_vocabulary, "^package: encoding sources failed"),
    ],
    ids=["one_source_only", "small_vocabulary"],
)
def test_an_encoder_that_fails_is_refused(tmp_path: Path, fault: Change, message: str) -> None:
    model = TinyModel(1, has_encoder=True)

    with pytest.raises(PackageError, match=message):
        warm_up(_load(model, tmp_path, encoder=fault), model.contract, "package")


@pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder", "encoder-decoder"])
@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_a_sound_model_warms_up_and_leaves_an_empty_cache(
    tmp_path: Path, has_encoder: bool, num_slots: int
) -> None:
    model = TinyModel(1, has_encoder=has_encoder)
    runner = SlotModelRunner.load(
        model.contract, *model.write(tmp_path), num_slots=num_slots, num_threads=1
    )

    warm_up(runner, model.contract, "package")
    assert rows_are_bit_equal(runner, model.contract, WIDEST)

    cache = runner.cache
    assert not cache.lengths.any() and not cache.source_lengths.any()
    assert not any(a.any() for layer in (*cache.layers, *cache.cross_layers) for a in layer)


@pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder", "encoder-decoder"])
def test_a_decoder_whose_rows_mix_is_seen(tmp_path: Path, has_encoder: bool) -> None:
    def mix(graph: onnx.GraphProto) -> None:
        axes = _constant(graph, "rows", [0])
        graph.node.append(helper.make_node("ReduceSum", ["raw_logits", axes], ["of_all"]))
        _write_behind(graph, "logits", "Add", "of_all")

    model = TinyModel(1, has_encoder=has_encoder)
    runner = _load(model, tmp_path, decoder=mix)

    assert not rows_are_bit_equal(runner, model.contract, WIDEST)


def test_an_encoder_whose_sources_mix_is_seen(tmp_path: Path) -> None:
    def mix(graph: onnx.GraphProto) -> None:
        first = graph.node[0].output[0]  # the embeddings, [C, S, width]
        axes = _constant(graph, "sources", [0])
        graph.node[0].output[0] = "raw"
        graph.node.insert(1, helper.make_node("ReduceMean", ["raw", axes], ["of_all"]))
        graph.node.insert(2, helper.make_node("Add", ["raw", "of_all"], [first]))

    model = TinyModel(1, has_encoder=True)
    runner = _load(model, tmp_path, encoder=mix)

    assert not rows_are_bit_equal(runner, model.contract, WIDEST)
