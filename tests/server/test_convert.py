"""Requests become the engine's, field by field, or are refused with every path named."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from tokenweir.v1 import common_pb2
from tokenweir.v1 import generation_service_pb2 as pb
from tokenweir.v1 import prediction_service_pb2 as prediction_pb

from engine.errors import CapabilityNotSupported, FieldViolation, InvalidRequest
from engine.prediction import PredictionItem
from engine.request import GenerationRequest, RequestLimits, SamplingParams
from server import convert
from tests.server.calls import generate
from tests.server.fakes import generation_package

SAMPLING = pb.Decoding(sampling=pb.Sampling())


def _convert(request: Any, *, batch_invariant: bool = True) -> list[GenerationRequest]:
    return convert.generation_requests(
        request,
        manifest=generation_package(batch_invariant=batch_invariant).manifest,
        limits=RequestLimits(),
        request_ids=(f"id-{i}" for i in itertools.count()),
        deadline=12.5,
    )


def test_absent_fields_take_the_defaults_of_the_engine() -> None:
    (request,) = _convert(generate("hello"))

    assert request == GenerationRequest("id-0", "hello", SamplingParams(), deadline=12.5)


def test_every_field_reaches_the_engine() -> None:
    request = pb.GenerateRequest(
        model="dates",
        inputs=[pb.Input(tokens=common_pb2.TokenIds(ids=[3, 4]))],
        decoding=pb.Decoding(
            sampling=pb.Sampling(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**64 - 1),
            num_outputs=3,
        ),
        stopping=pb.Stopping(
            max_new_tokens=9,
            min_new_tokens=2,
            strings=["\n", "END"],
            token_ids=[5],
            include_stop=True,
            ignore_eos=True,
        ),
    )

    (converted,) = _convert(request)

    assert converted.prompt == (3, 4)
    assert converted.params == SamplingParams(
        strategy="sampling",
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        seed=2**64 - 1,
        num_outputs=3,
        max_new_tokens=9,
        min_new_tokens=2,
        stop_strings=("\n", "END"),
        stop_token_ids=(5,),
        include_stop=True,
        ignore_eos=True,
    )


def test_inputs_keep_their_order_paths_and_names() -> None:
    requests = _convert(generate("a", "b", "c"))

    assert [(r.prompt, r.input_path, r.request_id) for r in requests] == [
        ("a", "inputs[0]", "id-0"),
        ("b", "inputs[1]", "id-1"),
        ("c", "inputs[2]", "id-2"),
    ]


def test_one_seed_is_drawn_for_all_inputs_of_a_call() -> None:
    first, second = _convert(generate("a", "b", decoding=SAMPLING))

    assert first.params.seed is not None
    assert first.params.seed == second.params.seed


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"decoding": pb.Decoding(beam=pb.BeamSearch(width=4))}, "decoding.beam"),
        (
            {"decoding": pb.Decoding(sampling=pb.Sampling(typical_p=0.9))},
            "decoding.sampling.typical_p",
        ),
        ({"decoding": pb.Decoding(sampling=pb.Sampling(best_of=4))}, "decoding.sampling.best_of"),
        (
            {"decoding": pb.Decoding(constraint=pb.Constraint(regex="a*"))},
            "decoding.constraint",
        ),
        ({"output": pb.Output(logprobs=0)}, "output.logprobs"),
        ({"output": pb.Output(prompt_logprobs=1)}, "output.prompt_logprobs"),
        ({"output": pb.Output(alignment=True)}, "output.alignment"),
        ({"output": pb.Output(allow_partial=True)}, "output.allow_partial"),
        ({"scheduling": pb.Scheduling(priority=-1)}, "scheduling.priority"),
        ({"scheduling": pb.Scheduling(tenant="t")}, "scheduling.tenant"),
        ({"scheduling": pb.Scheduling(adapter="a")}, "scheduling.adapter"),
        ({"scheduling": pb.Scheduling(determinism=77)}, "scheduling.determinism"),
    ],
)
def test_what_this_server_lacks_is_refused_by_its_path(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(CapabilityNotSupported, match=path) as caught:
        _convert(generate("a", **fields))

    assert caught.value.features == (path,)


@pytest.mark.parametrize(
    ("controls", "name"),
    [
        (pb.LogitControls(repetition_penalty=1.1), "repetition_penalty"),
        (pb.LogitControls(frequency_penalty=0.1), "frequency_penalty"),
        (pb.LogitControls(presence_penalty=0.1), "presence_penalty"),
        (pb.LogitControls(no_repeat_ngram=2), "no_repeat_ngram"),
        (pb.LogitControls(logit_bias={3: 1.0}), "logit_bias"),
        (pb.LogitControls(banned_tokens=[3]), "banned_tokens"),
    ],
)
def test_logit_controls_are_refused_by_their_path(controls: pb.LogitControls, name: str) -> None:
    with pytest.raises(CapabilityNotSupported) as caught:
        _convert(generate("a", decoding=pb.Decoding(controls=controls)))

    assert caught.value.features == (f"decoding.controls.{name}",)


def test_controls_that_are_set_to_none_are_no_controls() -> None:
    none = pb.LogitControls(
        repetition_penalty=1, frequency_penalty=0, presence_penalty=0, no_repeat_ngram=0
    )

    assert len(_convert(generate("a", decoding=pb.Decoding(controls=none)))) == 1


def test_everything_that_is_lacking_is_named_at_once() -> None:
    extensions = Struct()
    extensions.update({"tempreature": 0.5})
    request = generate("a", output=pb.Output(alignment=True), extensions=extensions)
    request.inputs[0].prefix_text = "2"

    with pytest.raises(CapabilityNotSupported) as caught:
        _convert(request)

    assert set(caught.value.features) == {
        "output.alignment",
        "inputs[0].prefix_text",
        "extensions.tempreature",
    }


def test_batch_invariance_is_taken_where_the_certificate_shows_it_and_refused_elsewhere() -> None:
    scheduling = pb.Scheduling(determinism=common_pb2.DETERMINISM_BATCH_INVARIANT)
    request = generate("a", scheduling=scheduling)

    assert len(_convert(request, batch_invariant=True)) == 1
    with pytest.raises(CapabilityNotSupported, match="scheduling.determinism"):
        _convert(request, batch_invariant=False)


def test_wrong_fields_are_named_together() -> None:
    request = generate(
        "a",
        request_id="x" * 200,
        decoding=pb.Decoding(sampling=pb.Sampling(temperature=0, top_p=1.5)),
    )
    request.inputs.add()

    with pytest.raises(InvalidRequest) as caught:
        _convert(request)

    assert {v.field for v in caught.value.violations} == {
        "request_id",
        "decoding.sampling.temperature",
        "decoding.sampling.top_p",
        "inputs[1]",
    }


@pytest.mark.parametrize("count", [0, 65])
def test_the_number_of_inputs_is_checked_before_any_is_looked_at(count: int) -> None:
    request = pb.GenerateRequest(model="dates", inputs=[pb.Input()] * count)

    with pytest.raises(InvalidRequest) as caught:
        _convert(request)

    assert caught.value.violations == (
        FieldViolation("inputs", f"{count} of them are outside 1 to 64"),
    )


def test_a_stream_takes_one_input_and_a_sane_number_of_tokens_per_message() -> None:
    request = pb.GenerateStreamRequest(request=generate("a", "b"), tokens_per_message=0)

    with pytest.raises(InvalidRequest) as caught:
        convert.check_stream_request(request)

    assert {v.field for v in caught.value.violations} == {"request.inputs", "tokens_per_message"}
    assert convert.check_stream_request(pb.GenerateStreamRequest(request=generate("a"))) == 1


def test_streams_cannot_be_resumed_yet() -> None:
    with pytest.raises(CapabilityNotSupported, match="resume_after"):
        convert.check_stream_request(
            pb.GenerateStreamRequest(request=generate("a"), resume_after=0)
        )


def test_items_become_text_pairs_ids_and_images() -> None:
    items = [
        prediction_pb.Item(text="a", text_pair=""),
        prediction_pb.Item(tokens=common_pb2.TokenIds(ids=[1, 2])),
        prediction_pb.Item(image=b"png"),
    ]

    assert convert.prediction_items(items, "", RequestLimits()) == [
        PredictionItem("a", ""),
        PredictionItem((1, 2)),
        PredictionItem(b"png"),
    ]


def test_empty_items_are_named() -> None:
    items = [prediction_pb.Item(text="a"), prediction_pb.Item(), prediction_pb.Item()]

    with pytest.raises(InvalidRequest) as caught:
        convert.prediction_items(items, "", RequestLimits())

    assert [v.field for v in caught.value.violations] == ["items[1]", "items[2]"]
