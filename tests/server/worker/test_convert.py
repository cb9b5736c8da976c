"""Requests become the engine's, field by field, or are refused with every path named."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st
from tokenweir.v1 import common_pb2
from tokenweir.v1 import generation_service_pb2 as pb
from tokenweir.v1 import prediction_service_pb2 as prediction_pb

from engine.config import RequestLimits
from engine.errors import CapabilityNotSupported, FieldViolation, InvalidRequest
from engine.one_pass.prediction import PredictionItem
from engine.package.package import Package
from engine.requests.request import (
    Chat,
    ChatMessage,
    Deltas,
    GenerationRequest,
    LogitControls,
    SamplingParams,
    ScoreRequest,
)
from server.worker import requests as convert
from server.worker.known_options import KnownOptions
from tests.fakes.calls import generate
from tests.fakes.engines import OPTIONS, generation_package

SAMPLING = pb.Decoding(sampling=pb.Sampling())


def _convert(
    request: Any, *, capabilities: tuple[str, ...] = OPTIONS, package: Package | None = None
) -> list[GenerationRequest]:
    manifest = (package or generation_package()).manifest
    params = KnownOptions().params(request, manifest, capabilities, RequestLimits())
    names = (f"id-{i}" for i in itertools.count())
    return convert.generation_requests(
        request, params, request_ids=names, deadline=12.5, deltas=Deltas(), seed=None
    )


def test_absent_fields_take_the_defaults_of_the_engine() -> None:
    (request,) = _convert(generate("hello"))

    assert request == GenerationRequest("id-0", "hello", SamplingParams(), deadline=12.5)


def test_a_conversation_reaches_the_engine() -> None:
    request = generate("hello")
    request.inputs[0].chat.messages.add(role="user", content="hello")

    (found,) = _convert(request, capabilities=(*OPTIONS, "chat"))

    assert found.prompt == Chat((ChatMessage("user", "hello"),))
    with pytest.raises(CapabilityNotSupported, match=r"inputs\[0\].chat: not supported"):
        _convert(request, capabilities=tuple(name for name in OPTIONS if name != "chat"))


def test_an_empty_conversation_is_refused() -> None:
    request = generate("hello")
    request.inputs[0].chat.SetInParent()

    with pytest.raises(InvalidRequest) as refused:
        _convert(request, capabilities=(*OPTIONS, "chat"))

    assert refused.value.violations == (
        FieldViolation("inputs[0].chat.messages", "give at least one"),
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


def test_beam_search_and_what_goes_with_it_reach_the_engine() -> None:
    request = generate(
        "a",
        decoding=pb.Decoding(
            beam=pb.BeamSearch(width=4, length_penalty=0, end=pb.BEAM_END_LIMIT), num_outputs=3
        ),
        output=pb.Output(
            logprobs=0, prompt_logprobs=2, prompt_tokens=True, alignment=True, allow_partial=True
        ),
    )

    (converted,) = _convert(request)

    assert converted.params == SamplingParams(
        strategy="beam",
        beam_width=4,
        length_penalty=0.0,
        beam_end="limit",
        num_outputs=3,
        logprobs=0,
        prompt_logprobs=2,
        prompt_token_ids=True,
        alignment=True,
        allow_partial=True,
    )


def test_what_beam_search_leaves_out_takes_the_defaults_of_the_engine() -> None:
    (converted,) = _convert(generate("a", decoding=pb.Decoding(beam=pb.BeamSearch(width=2))))

    assert converted.params == SamplingParams(strategy="beam", beam_width=2)


def test_prefix_priority_and_tenant_reach_the_engine() -> None:
    request = generate("a", "b", "c", scheduling=pb.Scheduling(priority=-3, tenant="team"))
    request.inputs[0].prefix_text = "2"
    request.inputs[1].prefix_tokens.ids.extend([4, 5])

    requests = _convert(request)

    assert [r.target_prefix for r in requests] == ["2", (4, 5), ()]
    assert {(r.priority, r.tenant) for r in requests} == {(-3, "team")}


ASKED: list[tuple[dict[str, Any], str, str]] = [
    ({"decoding": pb.Decoding(beam=pb.BeamSearch(width=4))}, "decoding.beam", "beam"),
    (
        {"decoding": pb.Decoding(sampling=pb.Sampling(typical_p=0.9))},
        "decoding.sampling.typical_p",
        "typical_p",
    ),
    (
        {"decoding": pb.Decoding(sampling=pb.Sampling(best_of=4))},
        "decoding.sampling.best_of",
        "best_of",
    ),
    (
        {"decoding": pb.Decoding(constraint=pb.Constraint(regex="a*"))},
        "decoding.constraint",
        "constraint",
    ),
    ({"output": pb.Output(logprobs=0)}, "output.logprobs", "logprobs"),
    ({"output": pb.Output(prompt_logprobs=1)}, "output.prompt_logprobs", "prompt_logprobs"),
    ({"output": pb.Output(alignment=True)}, "output.alignment", "alignment"),
    ({"output": pb.Output(allow_partial=True)}, "output.allow_partial", "allow_partial"),
    ({"scheduling": pb.Scheduling(priority=-1)}, "scheduling.priority", "priority"),
    ({"scheduling": pb.Scheduling(tenant="t")}, "scheduling.tenant", "fair_share"),
    (
        {
            "scheduling": pb.Scheduling(
                determinism=common_pb2.Determinism.DETERMINISM_BATCH_INVARIANT
            )
        },
        "scheduling.determinism",
        "batch_invariant",
    ),
    *(
        (
            {"decoding": pb.Decoding(controls=pb.LogitControls(**{name: value}))},  # type: ignore[arg-type]
            f"decoding.controls.{name}",
            "controls",
        )
        for name, value in {
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.1,
            "no_repeat_ngram": 2,
            "logit_bias": {3: 1.0},
            "banned_tokens": [3],
        }.items()
    ),
]


@pytest.mark.parametrize(("fields", "path", "capability"), ASKED)
def test_an_option_is_refused_by_its_path_where_the_model_lacks_just_its_capability(
    fields: dict[str, Any], path: str, capability: str
) -> None:
    request = generate("a", **fields)

    assert len(_convert(request, capabilities=(capability,))) == 1
    with pytest.raises(CapabilityNotSupported, match=path) as caught:
        _convert(request, capabilities=tuple(name for name in OPTIONS if name != capability))
    assert caught.value.features == (path,)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"scheduling": pb.Scheduling(adapter="a")}, "scheduling.adapter"),
        ({"scheduling": pb.Scheduling(determinism=77)}, "scheduling.determinism"),
        (
            {
                "decoding": pb.Decoding(
                    constraint=pb.Constraint(required_phrases=pb.Phrases(values=["a"]))
                )
            },
            "decoding.constraint.required_phrases",
        ),
    ],
)
def test_what_no_model_has_is_refused_by_its_path(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(CapabilityNotSupported, match=path) as caught:
        _convert(generate("a", **fields))

    assert caught.value.features == (path,)


def test_options_that_are_set_to_none_need_no_capability() -> None:
    controls = pb.LogitControls(
        repetition_penalty=1, frequency_penalty=0, presence_penalty=0, no_repeat_ngram=0
    )
    sampling = pb.Sampling(typical_p=1, best_of=2)
    decoding = pb.Decoding(controls=controls, sampling=sampling, num_outputs=2)

    assert len(_convert(generate("a", decoding=decoding), capabilities=())) == 1


def test_everything_that_is_lacking_is_named_at_once() -> None:
    extensions = Struct()
    extensions.update({"tempreature": 0.5})
    request = generate("a", output=pb.Output(alignment=True), extensions=extensions)
    request.inputs[0].prefix_text = "2"

    with pytest.raises(CapabilityNotSupported) as caught:
        _convert(request, capabilities=())

    assert set(caught.value.features) == {
        "output.alignment",
        "inputs[0].prefix_text",
        "extensions.tempreature",
    }


def test_wrong_fields_are_named_together() -> None:
    request = generate(
        "a",
        request_id="x" * 200,
        decoding=pb.Decoding(
            sampling=pb.Sampling(temperature=0, top_p=1.5), constraint=pb.Constraint()
        ),
        scheduling=pb.Scheduling(tenant="a\n"),
    )
    request.inputs.add()

    with pytest.raises(InvalidRequest) as caught:
        _convert(request)

    assert {v.field for v in caught.value.violations} == {
        "request_id",
        "decoding.sampling.temperature",
        "decoding.sampling.top_p",
        "decoding.constraint",
        "scheduling.tenant",
        "inputs[1]",
    }


_INTS = st.sampled_from([0, 1, -1, 7, 2**31 - 1, -(2**31)])
_FLOATS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e38, 1e-45, *map(float, ("nan", "inf", "-inf"))])
_STRATEGIES = st.one_of(
    st.builds(
        pb.Sampling,
        temperature=_FLOATS,
        top_k=_INTS,
        top_p=_FLOATS,
        min_p=_FLOATS,
        typical_p=_FLOATS,
        best_of=_INTS,
    ).map(lambda sampling: {"sampling": sampling}),
    st.builds(
        pb.BeamSearch,
        width=_INTS,
        length_penalty=_FLOATS,
        length_penalty_form=st.integers(0, 3),
        end=_INTS,
    ).map(lambda beam: {"beam": beam}),
    st.builds(pb.BeamSearch, width=_INTS, length_penalty=_FLOATS, end=st.integers(0, 5)).map(
        lambda beam: {"beam": beam}
    ),
)
_CONTROLS = st.builds(
    pb.LogitControls,
    repetition_penalty=_FLOATS,
    frequency_penalty=_FLOATS,
    presence_penalty=_FLOATS,
    no_repeat_ngram=_INTS,
    logit_bias=st.dictionaries(_INTS, _FLOATS),
    banned_tokens=st.lists(_INTS),
    banned_sequences=st.lists(st.builds(common_pb2.TokenIds, ids=st.lists(_INTS))),
    begin_banned_tokens=st.lists(_INTS),
    encoder_no_repeat_ngram=_INTS,
)
_OUTPUTS = st.builds(pb.Output, logprobs=_INTS, prompt_logprobs=_INTS)


@given(strategy=_STRATEGIES, controls=_CONTROLS, num_outputs=_INTS, output=_OUTPUTS)
def test_whatever_numbers_are_sent_they_are_possible_or_refused(
    strategy: dict[str, Any], controls: pb.LogitControls, num_outputs: int, output: pb.Output
) -> None:
    decoding = pb.Decoding(**strategy, controls=controls, num_outputs=num_outputs)

    try:
        (request,) = _convert(generate("a", decoding=decoding, output=output))
    except InvalidRequest as error:
        assert error.violations
    else:
        params = request.params
        assert 1 <= params.num_outputs <= params.num_sequences <= 16
        assert all(math.isfinite(bias) for _, bias in params.controls.logit_bias)
        assert 0 < params.controls.repetition_penalty < math.inf
        assert params.length_penalty is None or abs(params.length_penalty) <= 10
        assert params.length_penalty_form in (None, "power", "paper")
        assert all(params.controls.banned_sequences)


@pytest.mark.parametrize(
    ("count", "hint"), [(0, "send at least one"), (65, "divide them between calls")]
)
def test_the_number_of_inputs_is_checked_before_any_is_looked_at(count: int, hint: str) -> None:
    request = pb.GenerateRequest(model="dates", inputs=[pb.Input()] * count)

    with pytest.raises(InvalidRequest) as caught:
        _convert(request)

    assert caught.value.violations == (
        FieldViolation("inputs", f"{count} of them are outside 1 to 64; {hint}"),
    )


def test_what_a_request_leaves_away_has_the_defaults_of_the_package() -> None:
    package = generation_package(
        strategy="beam", beam=4, length_penalty=1.0, banned_tokens=(3,), forced_begin=(5,)
    )
    wide = pb.Decoding(beam=pb.BeamSearch())

    (bare,) = _convert(generate("a"), package=package)
    (same,) = _convert(generate("a", decoding=wide), package=package)
    (own,) = _convert(generate("a", decoding=SAMPLING), package=package)
    (none,) = _convert(generate("a", without_defaults=["*"]), package=package)

    controls = LogitControls(banned_tokens=(3,))
    assert bare.params == SamplingParams(
        "beam", beam_width=4, length_penalty=1.0, controls=controls, forced_begin=(5,)
    )
    assert same.params == bare.params
    assert (own.params.strategy, own.params.controls) == ("sampling", controls)
    assert none.params == SamplingParams()


def test_beams_without_a_width_are_refused_where_the_package_has_none() -> None:
    beams = generate("a", decoding=pb.Decoding(beam=pb.BeamSearch()))
    package = generation_package(beam=4)
    beams_of_nobody = generate("a", decoding=beams.decoding, without_defaults=["beam"])

    for request, which in ((beams, None), (beams_of_nobody, package)):
        with pytest.raises(InvalidRequest, match="0 is outside 1 to 16 hypotheses"):
            _convert(request, package=which)


def test_a_refusal_tells_that_a_default_of_the_package_has_to_do_with_it() -> None:
    package = generation_package(strategy="beam", beam=2)

    with pytest.raises(InvalidRequest) as caught:
        _convert(
            generate(
                "a",
                decoding=pb.Decoding(num_outputs=3, controls=pb.LogitControls(no_repeat_ngram=-1)),
            ),
            package=package,
        )

    by_field = {v.field: v.description for v in caught.value.violations}
    assert "defaults of the package hold here" in by_field["decoding.num_outputs"]
    assert "defaults" not in by_field["decoding.controls.no_repeat_ngram"]


def test_a_default_that_no_package_can_have_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        _convert(generate("a", without_defaults=["beam", "colour", "shape"]))

    (violation,) = caught.value.violations
    assert violation.field == "without_defaults[1]"
    assert "'colour' is not an option that a package can have a default of" in violation.description


def test_a_scored_text_stands_behind_the_forced_beginning_of_the_package() -> None:
    request = pb.ScoreRequest(inputs=[pb.Input(text="a", prefix_text="b")])

    (score,) = convert.score_requests(
        request,
        manifest=generation_package(forced_begin=(5,)).manifest,
        limits=RequestLimits(),
        request_ids=iter(["id"]),
        deadline=None,
    )

    assert score.forced_begin == (5,)


def test_an_end_of_beam_search_that_is_not_known_is_refused() -> None:
    beam = pb.BeamSearch(width=2, end=9)  # type: ignore[arg-type]

    with pytest.raises(InvalidRequest, match="9 is none of bound, estimate, enough, limit"):
        _convert(generate("a", decoding=pb.Decoding(beam=beam)))


def test_the_number_of_everything_is_checked_before_any_of_it_is_looked_at() -> None:
    request = generate(
        "a",
        decoding=pb.Decoding(
            controls=pb.LogitControls(
                logit_bias=dict.fromkeys(range(2000), 1.0),
                banned_tokens=[-1] * 2000,
                banned_sequences=[common_pb2.TokenIds(ids=[-1] * 2000)],
                begin_banned_tokens=[-1] * 2000,
            ),
            forced_begin=[-1] * 2000,
            constraint=pb.Constraint(choice=pb.Phrases(values=[""] * 2000)),
        ),
        stopping=pb.Stopping(strings=[""] * 2000, token_ids=[-1] * 2000),
    )

    with pytest.raises(InvalidRequest) as caught:
        _convert(request)

    assert {v.field: v.description for v in caught.value.violations} == {
        path: f"2000 of them are more than {most}; send fewer"
        for path, most in {
            "decoding.controls.logit_bias": 1024,
            "decoding.controls.banned_tokens": 1024,
            "decoding.controls.begin_banned_tokens": 1024,
            "decoding.controls.banned_sequences": 1024,
            "decoding.forced_begin": 64,
            "decoding.constraint.choice": 256,
            "stopping.strings": 16,
            "stopping.token_ids": 64,
        }.items()
    }


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


def _convert_scores(request: pb.ScoreRequest) -> list[ScoreRequest]:
    return convert.score_requests(
        request,
        manifest=generation_package().manifest,
        limits=RequestLimits(),
        request_ids=iter(("id-0", "id-1")),
        deadline=12.5,
    )


def test_a_score_takes_its_target_from_the_prefix() -> None:
    ids = common_pb2.TokenIds(ids=[3, 4])
    request = pb.ScoreRequest(
        inputs=[pb.Input(text="a", prefix_tokens=ids), pb.Input(tokens=ids, prefix_text="b")],
        top_logprobs=2,
    )

    assert _convert_scores(request) == [
        ScoreRequest("id-0", "a", (3, 4), 2, deadline=12.5),
        ScoreRequest("id-1", (3, 4), "b", 2, deadline=12.5, input_path="inputs[1]"),
    ]


def test_wrong_fields_of_a_score_are_named_together() -> None:
    request = pb.ScoreRequest(
        inputs=[pb.Input(text="a"), pb.Input(prefix_text="b")],
        top_logprobs=21,
        request_id="\n",
    )

    with pytest.raises(InvalidRequest) as caught:
        _convert_scores(request)

    assert [v.field for v in caught.value.violations] == [
        "top_logprobs",
        "request_id",
        "inputs[1]",
        "inputs[0]",
    ]


def test_items_become_text_pairs_ids_and_images() -> None:
    items = [
        prediction_pb.Item(text="a", text_pair=""),
        prediction_pb.Item(tokens=common_pb2.TokenIds(ids=[1, 2])),
        prediction_pb.Item(image=b"png"),
    ]

    request = prediction_pb.LabelRequest(items=items)
    assert convert.prediction_items(request, RequestLimits()) == [
        PredictionItem("a", ""),
        PredictionItem((1, 2)),
        PredictionItem(b"png"),
    ]


def test_empty_items_are_named() -> None:
    items = [prediction_pb.Item(text="a"), prediction_pb.Item(), prediction_pb.Item()]

    with pytest.raises(InvalidRequest) as caught:
        convert.prediction_items(prediction_pb.EmbedRequest(items=items), RequestLimits())

    assert [v.field for v in caught.value.violations] == ["items[1]", "items[2]"]


@pytest.mark.parametrize(("given", "side"), [(0, None), (1, "right"), (2, "left")])
def test_texts_are_cut_at_the_side_that_is_asked_for(given: int, side: str | None) -> None:
    request = prediction_pb.ClassifyRequest(items=[prediction_pb.Item(text="a")], truncation=given)

    (item,) = convert.prediction_items(request, RequestLimits())

    assert item.truncation == side


@pytest.mark.parametrize("stride", [None, 0, 2])
def test_texts_are_labelled_in_windows_where_it_is_asked_for(stride: int | None) -> None:
    request = prediction_pb.LabelRequest(items=[prediction_pb.Item(text="a")], stride=stride)

    assert convert.prediction_items(request, RequestLimits()) == [
        PredictionItem("a", stride=stride)
    ]


def test_a_side_that_is_newer_than_this_worker_is_named() -> None:
    request = prediction_pb.EmbedRequest(items=[prediction_pb.Item(text="a")], truncation=9)

    with pytest.raises(InvalidRequest, match=r"truncation: 9 is none of \[0, 1, 2\]"):
        convert.prediction_items(request, RequestLimits())


IDS = common_pb2.TokenIds(ids=[1] * 2_000)


@pytest.mark.parametrize("name", ["tokens", "prefix_tokens"])
def test_token_ids_are_counted_before_they_are_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reading in ("_prompt", "_target_prefix"):
        monkeypatch.setattr(convert, reading, None)
    one = pb.Input(tokens=IDS) if name == "tokens" else pb.Input(text="a", prefix_tokens=IDS)

    with pytest.raises(InvalidRequest) as caught:
        _convert(pb.GenerateRequest(inputs=[one]))

    assert [violation.field for violation in caught.value.violations] == [f"inputs[0].{name}"]


def test_token_ids_to_be_scored_are_counted_before_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(convert, "_prompt", None)

    with pytest.raises(InvalidRequest, match="2000 tokens are more than 64"):
        _convert_scores(pb.ScoreRequest(inputs=[pb.Input(text="a", prefix_tokens=IDS)]))


def test_of_many_extensions_a_few_are_named() -> None:
    extensions = Struct()
    extensions.update({f"x{i}": None for i in range(1_000)})

    with pytest.raises(CapabilityNotSupported) as caught:
        _convert(generate("a", extensions=extensions))

    assert len(caught.value.features) == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"decoding": {"num_outputs": 0}},
        {"decoding": {"sampling": {"temperature": 0}}},
        {"decoding": {"sampling": {"top_p": 0}}},
        {"decoding": {"sampling": {"typical_p": 0}}},
        {"decoding": {"sampling": {"best_of": 0}}},
        {"decoding": {"beam": {"width": 0}}},
        {"decoding": {"controls": {"repetition_penalty": 0}}},
    ],
)
def test_a_zero_is_refused_where_the_protocol_says_so(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        _convert(generate("a", **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"decoding": {"sampling": {"top_k": 0, "min_p": 0, "seed": 7}}},
        {
            "decoding": {
                "controls": {"frequency_penalty": 0, "presence_penalty": 0, "no_repeat_ngram": 0}
            }
        },
        {"stopping": {"min_new_tokens": 0}},
        {"scheduling": {"priority": 0}},
    ],
)
def test_a_zero_is_the_same_as_nothing_where_the_protocol_says_so(fields: dict[str, Any]) -> None:
    nothing = {"decoding": {"sampling": {"seed": 7}}} if "sampling" in str(fields) else {}

    assert _convert(generate("a", **fields)) == _convert(generate("a", **nothing))
