"""Results of the engines become the protocol's answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenweir.v1 import admin_service_pb2, common_pb2

from engine.one_pass.prediction import ItemPrediction
from engine.package.package import Package
from engine.requests.events import Timing
from server.config import WorkerConfig
from server.worker import admin_answers, answers, prediction
from server.worker.answers import ServedModel
from tests.fakes.engines import (
    LABELS,
    OPTIONS,
    TIMING,
    FakeGenerator,
    generation_package,
    prediction_package,
)


def _item(logits: list[float] | list[list[float]]) -> ItemPrediction:
    return ItemPrediction(
        np.array(logits, dtype=np.float32), np.array([3, 4], dtype=np.float32), input_tokens=2
    )


@pytest.mark.parametrize(
    ("top", "labels"),
    [
        (None, ["DET"]),
        (2, ["DET", "NOUN"]),
        (0, ["DET", "NOUN", "VERB"]),
        (9, ["DET", "NOUN", "VERB"]),
    ],
)
def test_classes_are_the_best_first(top: int | None, labels: list[str]) -> None:
    classes = prediction.classes(_item([1.0, 0.0, 2.0]), LABELS, top)

    assert [label.label for label in classes.labels] == labels
    assert classes.labels[0].probability == pytest.approx(0.6652409)
    assert classes.labels[0].index == 2


def test_probabilities_of_large_logits_are_finite() -> None:
    classes = prediction.classes(_item([1e30, 0.0, -1e30]), LABELS, 0)

    assert [label.probability for label in classes.labels] == [1.0, 0.0, 0.0]


def test_labels_that_do_not_exclude_each_other_have_probabilities_of_their_own() -> None:
    classes = prediction.classes(_item([0.0, 2.0, -1e30]), LABELS, 0, "sigmoid")

    assert [label.label for label in classes.labels] == ["VERB", "NOUN", "DET"]
    found = [label.probability for label in classes.labels]
    assert found == pytest.approx([0.8807971, 0.5, 0.0])


def test_numbers_of_a_regression_are_told_as_they_are() -> None:
    classes = prediction.classes(_item([3.5, -2.0]), LABELS, 0, "none")

    assert [label.probability for label in classes.labels] == [3.5, -2.0]


def test_spans_stand_at_the_bytes_of_their_tokens() -> None:
    item = replace(_item([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0]]), spans=((0, 2), (3, 6)))

    spans = prediction.spans(item, LABELS).spans

    assert [(s.start_byte, s.end_byte, s.label.label) for s in spans] == [
        (0, 2, "NOUN"),
        (3, 6, "VERB"),
    ]


def test_a_text_without_words_has_no_spans() -> None:
    item = replace(_item([0.0]), logits=np.zeros((0, 3), np.float32))

    for strategy in (None, "simple", "average"):
        assert not prediction.spans(item, LABELS, strategy).spans


def test_vectors_are_scaled_to_length_1_only_if_asked_and_zero_stays_zero() -> None:
    zero = replace(_item([0.0]), embedding=np.zeros(2, dtype=np.float32))

    assert list(prediction.vector(_item([0.0]), normalize=False).values) == [3, 4]
    assert list(prediction.vector(_item([0.0]), normalize=True).values) == pytest.approx([0.6, 0.8])
    assert list(prediction.vector(zero, normalize=True).values) == [0, 0]


def test_times_of_several_inputs_are_the_longest_and_batch_sizes_their_mean() -> None:
    other = Timing(
        queue=1.5, prefill=0.0, decode=0.0, time_to_first_token=1.6, steps=1, mean_batch_size=6.0
    )

    timing = answers.timing([TIMING, other])

    assert timing.queue.ToTimedelta().total_seconds() == 1.5
    assert timing.prefill.ToTimedelta().total_seconds() == 0.02
    assert timing.steps == 3
    assert timing.mean_batch_size == 3.0


def test_limits_of_an_encoder_decoder_are_those_of_its_two_caches() -> None:
    limits = _limits(generation_package())

    assert (limits.max_input_tokens, limits.max_output_tokens) == (16, 63)
    assert (limits.max_inputs, limits.max_num_outputs, limits.max_stop_strings) == (64, 8, 16)
    assert limits.max_request_bytes == 1000


def test_limits_of_a_one_pass_model_promise_no_output() -> None:
    limits = _limits(prediction_package())

    assert (limits.max_input_tokens, limits.max_output_tokens, limits.max_num_outputs) == (32, 0, 0)


def test_limits_of_options_are_told_where_the_model_has_the_options() -> None:
    with_options = _limits(generation_package(), OPTIONS)
    without = _limits(generation_package())

    assert (with_options.max_beam_width, with_options.max_logprobs) == (16, 20)
    assert (without.max_beam_width, without.max_logprobs) == (0, 0)


@pytest.mark.parametrize(
    ("capabilities", "may_vary", "expected"),
    [
        (("batch_invariant",), False, common_pb2.DETERMINISM_BATCH_INVARIANT),
        (("batch_invariant",), True, common_pb2.DETERMINISM_BEST_EFFORT),
        ((), False, common_pb2.DETERMINISM_BEST_EFFORT),  # certified, but not shown here
    ],
)
def test_an_answer_is_batch_invariant_where_that_was_shown_and_nobody_asked_for_less(
    capabilities: tuple[str, ...], may_vary: bool, expected: int
) -> None:
    model = answers.ServedModel("m", FakeGenerator(), capabilities, "replica")

    assert answers.provenance(model, may_vary=may_vary).determinism == expected


def _limits(package: Package, capabilities: tuple[str, ...] = ()) -> admin_service_pb2.Limits:
    engine: Any = SimpleNamespace(package=package, device="cpu")
    model = answers.ServedModel("m", engine, capabilities, "replica")
    info = admin_answers.model_info(
        model,
        state=admin_service_pb2.MODEL_STATE_READY,
        message="",
        config=WorkerConfig(max_request_bytes=1000),
    )
    return info.limits


_ORIGIN: dict[str, Any] = {"manifest_sha256": b"a", "device": "cpu", "num_threads": 1}


def _origin(seed: int | None = None, **fields: Any) -> str:
    found = _ORIGIN | fields
    package = SimpleNamespace(manifest_sha256=found.pop("manifest_sha256"))
    engine: Any = SimpleNamespace(package=package, **found)
    return answers.origin(ServedModel("m", engine, (), "replica"), seed)


def test_an_origin_is_that_of_package_device_threads_and_seed() -> None:
    others = ({"manifest_sha256": b"b"}, {"device": "cuda"}, {"num_threads": 2}, {"seed": 7})
    found = [_origin(), *(_origin(**fields) for fields in others)]

    assert _origin() == found[0]
    assert len(set(found)) == 5


def test_another_processor_is_another_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    here = _origin()
    monkeypatch.setattr(answers, "_processor", lambda device: f"another kind of {device}")

    answers._digest.cache_clear()
    try:
        assert _origin() != here
    finally:
        answers._digest.cache_clear()
