"""Answers of a worker to well-formed calls, over real gRPC on engines that obey the test."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from importlib import metadata

import grpc
import pytest
from tokenweir.v1 import (
    admin_service_pb2,
    common_pb2,
    prediction_service_pb2,
)
from tokenweir.v1 import generation_service_pb2 as pb

from engine.errors import EngineFailure
from engine.machine import processor_kind
from tests.fakes.calls import Stubs, as_dict, failure_of, generate, stream, stubs_for, until
from tests.fakes.engines import (
    OPTIONS,
    TIMING,
    FakeGenerator,
    FakePredictor,
    prediction_package,
    running_worker,
)


@pytest.fixture
async def engine() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture
async def stubs(engine: FakeGenerator) -> AsyncIterator[Stubs]:
    tagger, classifier = (
        FakePredictor(),
        FakePredictor(prediction_package("digits", task="classify")),
    )
    async with running_worker(engine, tagger, classifier) as (_, address):
        async with stubs_for(address) as stubs:
            yield stubs


async def test_generate_answers_every_input_in_order(stubs: Stubs) -> None:
    response = await stubs.generation.Generate(
        generate("a b", "c STOP", request_id="call-1", output=pb.Output(token_ids=True))
    )

    first, second = (result.sequences[0] for result in response.results)
    assert response.request_id == "call-1"
    assert (first.text, list(first.tokens.ids)) == ("a b ", [1, 1])
    assert first.WhichOneof("matched_stop") is None
    assert (second.text, second.stop_string) == ("c STOP ", "STOP")
    assert second.finish_reason == common_pb2.FINISH_REASON_STOP
    assert (response.usage.input_tokens, response.usage.output_tokens) == (4, 4)


async def test_an_answer_says_what_gave_it(engine: FakeGenerator, stubs: Stubs) -> None:
    engine.capabilities = (*engine.capabilities, "batch_invariant")
    decoding = pb.Decoding(sampling=pb.Sampling(seed=42))

    response = await stubs.generation.Generate(generate("a", decoding=decoding))

    assert as_dict(response.provenance) == {
        "model": "dates",
        "model_version": "7",
        "manifest_sha256": "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=",
        "seed": "42",
        "determinism": "DETERMINISM_BATCH_INVARIANT",
        "replica_id": response.provenance.replica_id,
        "server_version": metadata.version("tokenweir"),
        "processor": processor_kind(),
        "threads": 1,
    }
    assert response.provenance.replica_id
    assert response.timing.queue.ToMilliseconds() == 10
    assert re.fullmatch(r"[0-9a-f-]{36}", response.request_id)


async def test_an_input_that_fails_fails_the_call_and_aborts_the_others(
    stubs: Stubs, engine: FakeGenerator
) -> None:
    engine.error = EngineFailure("a step failed")

    failure = await failure_of(stubs.generation.Generate(generate("HOLD", "FAIL", "HOLD")))

    assert (failure.code, failure.message) == (grpc.StatusCode.INTERNAL, "a step failed")
    assert len(engine.aborted) == 3


async def test_a_stream_is_deltas_then_one_end_per_sequence_then_one_summary(
    stubs: Stubs,
) -> None:
    decoding = pb.Decoding(sampling=pb.Sampling(seed=1), num_outputs=2)

    messages = [
        message
        async for message in stubs.generation.GenerateStream(
            stream("SLOW b STOP", decoding=decoding, request_id="call-2")
        )
    ]

    assert [m.sequence_number for m in messages] == list(range(1, len(messages) + 1))
    for index in (0, 1):
        deltas = [m.delta for m in messages if m.HasField("delta")]
        texts = [delta.text for delta in deltas if delta.index == index]
        assert texts == ["SLOW ", "b ", "STOP "]
    ends = [m.finished for m in messages if m.HasField("finished")]
    assert [(e.index, e.stop_string) for e in ends] == [(0, "STOP"), (1, "STOP")]
    assert [m.WhichOneof("event") for m in messages].count("summary") == 1
    assert messages[-1].summary.request_id == "call-2"
    assert messages[-1].summary.provenance.seed == 1
    assert not messages[0].delta.HasField("tokens")


async def test_deltas_of_a_stream_concatenate_to_the_unary_answer(stubs: Stubs) -> None:
    output = pb.Output(token_ids=True)
    unary = await stubs.generation.Generate(generate("one two three four", output=output))

    deltas = [
        message.delta
        async for message in stubs.generation.GenerateStream(
            stream("one two three four", output=output, tokens_per_message=3)
        )
        if message.HasField("delta")
    ]

    sequence = unary.results[0].sequences[0]
    assert "".join(delta.text for delta in deltas) == sequence.text
    assert [i for delta in deltas for i in delta.tokens.ids] == list(sequence.tokens.ids)


async def test_the_engine_is_told_how_many_tokens_a_message_has(
    stubs: Stubs, engine: FakeGenerator
) -> None:
    async for _ in stubs.generation.GenerateStream(stream("a b", tokens_per_message=2)):
        pass
    await stubs.generation.Generate(generate("a b"))

    streamed, whole = engine.requests
    assert streamed.deltas is not None and streamed.deltas.min_tokens == 2
    assert whole.deltas is None


async def test_a_cancelled_unary_call_aborts_all_of_its_inputs(
    stubs: Stubs, engine: FakeGenerator
) -> None:
    call = stubs.generation.Generate(generate("HOLD", "HOLD"))
    waiting = asyncio.ensure_future(call)
    await until(lambda: len(engine.requests) == 2)

    waiting.cancel()

    await until(lambda: len(engine.aborted) == 2)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_bug_is_internal_for_the_client_and_a_trace_in_the_log(
    stubs: Stubs, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    call = (
        stubs.generation.GenerateStream(stream("CRASH", request_id="call-3"))
        if streamed
        else stubs.generation.Generate(generate("CRASH", request_id="call-3"))
    )

    failure = await failure_of(call)

    assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert failure.metadata["request_id"] == "call-3"
    assert "secret" not in str(failure)
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "call-3" in record.message
    assert record.exc_info is not None
    assert await stubs.still_serves()


async def test_models_are_listed_in_pages(stubs: Stubs) -> None:
    first = await stubs.admin.ListModels(admin_service_pb2.ListModelsRequest(page_size=2))
    second = await stubs.admin.ListModels(
        admin_service_pb2.ListModelsRequest(page_size=2, page_token=first.next_page_token)
    )

    assert [m.model for m in (*first.models, *second.models)] == ["dates", "digits", "tags"]
    assert second.next_page_token == ""


async def test_server_info_and_load(stubs: Stubs) -> None:
    info = await stubs.admin.GetServerInfo(admin_service_pb2.GetServerInfoRequest())
    load = await stubs.admin.GetLoad(admin_service_pb2.GetLoadRequest())

    assert info.version == metadata.version("tokenweir")
    assert "grpc.health.v1.Health" in info.features
    assert info.start_time.seconds > 0
    assert [(r.model, r.running, r.waiting) for r in load.replicas] == [
        ("dates", 3, 1),
        ("digits", 0, 0),
        ("tags", 0, 0),
    ]
    assert {r.replica_id for r in load.replicas} == {info.instance_id}
    assert load.replicas[0].wasted == admin_service_pb2.GetLoadResponse.WastedWork(
        padding_tokens=1,
        cancelled_tokens=2,
        expired_tokens=3,
        failed_tokens=4,
        discarded_tokens=5,
        preempted_tokens=6,
    )


async def test_a_call_for_another_kind_of_model_is_told_what_the_model_can(stubs: Stubs) -> None:
    item = prediction_service_pb2.Item(text="a")
    failures = [
        await failure_of(stubs.generation.Generate(generate("a", model="tags"))),
        await failure_of(
            stubs.prediction.Label(
                prediction_service_pb2.LabelRequest(model="digits", items=[item])
            )
        ),
        await failure_of(
            stubs.prediction.Embed(prediction_service_pb2.EmbedRequest(model="dates", items=[item]))
        ),
    ]

    assert {f.code for f in failures} == {grpc.StatusCode.UNIMPLEMENTED}
    assert [f.message for f in failures] == [
        "model tags cannot generate; it can label, embed",
        "model digits cannot label; it can classify, embed",
        "model dates cannot embed; it can generate, stream",
    ]


async def test_methods_that_are_not_there_yet_say_so(stubs: Stubs) -> None:
    calls = {
        "LoadModel": stubs.admin.LoadModel(admin_service_pb2.LoadModelRequest()),
        "UnloadModel": stubs.admin.UnloadModel(admin_service_pb2.UnloadModelRequest()),
    }

    for name, call in calls.items():
        failure = await failure_of(call)
        assert failure.code is grpc.StatusCode.UNIMPLEMENTED
        assert failure.reason == "CAPABILITY_NOT_SUPPORTED"
        assert failure.metadata["features"] == name


async def test_options_that_are_not_there_yet_are_refused_by_name(stubs: Stubs) -> None:
    decoding = pb.Decoding(beam=pb.BeamSearch(width=4))

    failure = await failure_of(stubs.generation.GenerateStream(stream("a", decoding=decoding)))

    assert failure.code is grpc.StatusCode.UNIMPLEMENTED
    assert failure.reason == "CAPABILITY_NOT_SUPPORTED"
    assert failure.metadata["features"] == "request.decoding.beam"
    assert failure.message.startswith("request.decoding.beam: not supported")


async def test_best_effort_is_reported_where_it_was_asked_for(stubs: Stubs) -> None:
    scheduling = pb.Scheduling(determinism=common_pb2.DETERMINISM_BEST_EFFORT)

    response = await stubs.generation.Generate(generate("a", scheduling=scheduling))

    assert response.provenance.determinism == common_pb2.DETERMINISM_BEST_EFFORT


def _score(*targets: str, model: str = "dates") -> pb.ScoreRequest:
    inputs = [pb.Input(text="source", prefix_text=target) for target in targets]
    return pb.ScoreRequest(model=model, inputs=inputs, top_logprobs=1, request_id="call-1")


async def test_targets_are_scored_in_order(stubs: Stubs, engine: FakeGenerator) -> None:
    engine.capabilities = OPTIONS

    response = await stubs.generation.Score(_score("a b", "c"))

    assert [score.sum_logprob for score in response.scores] == [-1, -0.5]
    assert [len(score.positions) for score in response.scores] == [2, 1]
    assert [token.id for token in response.scores[0].positions[0].top] == [90]
    assert (response.usage.input_tokens, response.provenance.model) == (3, "dates")
    assert [r.request_id for r in engine.scored] == ["call-1#1", "call-1#2"]


async def test_wrong_targets_are_named_by_their_inputs(stubs: Stubs, engine: FakeGenerator) -> None:
    engine.capabilities = OPTIONS

    failure = await failure_of(stubs.generation.Score(_score("a", "", "")))

    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(failure.violations) == ["inputs[1].prefix_text", "inputs[2].prefix_text"]


async def test_a_target_that_fails_fails_the_call(stubs: Stubs, engine: FakeGenerator) -> None:
    engine.capabilities = OPTIONS
    engine.error = EngineFailure("a step failed")

    failure = await failure_of(stubs.generation.Score(_score("a", "FAIL")))

    assert (failure.code, failure.message) == (grpc.StatusCode.INTERNAL, "a step failed")


@pytest.mark.parametrize("model", ["dates", "tags"])
async def test_a_model_that_does_not_score_says_so(stubs: Stubs, model: str) -> None:
    failure = await failure_of(stubs.generation.Score(_score("a", model=model)))

    assert failure.code is grpc.StatusCode.UNIMPLEMENTED
    assert failure.metadata["features"] == "score"


async def test_nothing_piles_up_for_a_reader_that_is_slower_than_the_engine(
    stubs: Stubs, engine: FakeGenerator
) -> None:
    """The engine's stream is read no faster than its messages go; the engine joins them then."""
    call = aiter(stubs.generation.GenerateStream(stream("HUGE")))
    first = await anext(call)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.done.wait(), 0.2)

    messages = [first, *[message async for message in call]]

    assert [m.sequence_number for m in messages] == list(range(1, len(messages) + 1))
    assert sum(len(m.delta.text) for m in messages) == 2_000 * 1_001
    assert engine.done.is_set()


async def test_a_score_is_scheduled_as_asked_and_says_what_it_took(
    stubs: Stubs, engine: FakeGenerator
) -> None:
    engine.capabilities = OPTIONS
    request = _score("a b")
    request.scheduling.priority, request.scheduling.tenant = 3, "team"

    response = await stubs.generation.Score(request)

    assert [(one.priority, one.tenant) for one in engine.scored] == [(3, "team")]
    assert response.request_id == "call-1"
    assert response.timing.prefill.ToTimedelta().total_seconds() == pytest.approx(TIMING.prefill)


async def test_a_score_that_asks_for_what_the_model_has_not_is_refused(
    stubs: Stubs, engine: FakeGenerator
) -> None:
    engine.capabilities = OPTIONS
    request = _score("a")
    request.scheduling.adapter = "x"

    failure = await failure_of(stubs.generation.Score(request))

    assert failure.code is grpc.StatusCode.UNIMPLEMENTED
    assert failure.metadata["features"] == "scheduling.adapter"


@pytest.mark.parametrize("method", ["Classify", "Label", "Embed"])
async def test_a_prediction_tells_the_id_of_its_call(stubs: Stubs, method: str) -> None:
    model = {"Classify": "digits"}.get(method, "tags")
    fields = {"model": model, "request_id": "call-2", "items": [{"text": "a"}]}
    request = getattr(prediction_service_pb2, f"{method}Request")(**fields)

    response = await getattr(stubs.prediction, method)(request)

    assert response.request_id == "call-2"
