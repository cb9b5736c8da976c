"""Events of a generating engine become the protocol's answers, field by field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenweir.v1 import common_pb2
from tokenweir.v1 import generation_service_pb2 as pb

from engine.requests.events import (
    FinishReason,
    PositionLogprobs,
    RequestFinished,
    Score,
    SequenceFinished,
    TextDelta,
    TokenLogprob,
    Usage,
)
from server.worker.answers import ServedModel
from server.worker.generation_answers import FINISH_REASONS, FinishedInput, GenerationAnswers
from tests.fakes.calls import as_dict
from tests.fakes.engines import TIMING, FakeGenerator

POSITION = PositionLogprobs(
    TokenLogprob(7, -2.0, 2), (TokenLogprob(8, -0.5, 1), TokenLogprob(7, -2.0, 2))
)
AS_MESSAGE = common_pb2.PositionLogprobs(
    chosen=common_pb2.TokenLogprob(id=7, piece=b"\xc3\x07", logprob=-2, rank=2),
    top=[
        common_pb2.TokenLogprob(id=8, piece=b"\xc3\x08", logprob=-0.5, rank=1),
        common_pb2.TokenLogprob(id=7, piece=b"\xc3\x07", logprob=-2, rank=2),
    ],
)
BEAM = SequenceFinished(
    index=1,
    reason=FinishReason.STOP,
    text="ab",
    token_ids=(7, 9),
    matched_stop=9,
    sum_logprob=-3.0,
    score=-1.5,
    logprobs=(POSITION, POSITION),
    alignment=((0.25, 0.75, 0.0), (0.0, 0.5, 0.5)),
    was_streamed=False,
)
AS_SEQUENCE = pb.Sequence(
    text="ab",
    tokens=common_pb2.TokenIds(ids=[7, 9]),
    logprobs=[AS_MESSAGE, AS_MESSAGE],
    finish_reason=common_pb2.FINISH_REASON_STOP,
    stop_token=9,
    score=-1.5,
    sum_logprob=-3,
    alignment=[0.25, 0.75, 0, 0, 0.5, 0.5],
    alignment_columns=3,
)
END = RequestFinished("r", Usage(4, 2, 3, 6), TIMING, seed=0, prompt_logprobs=(POSITION,))


class Spelling(FakeGenerator):
    def token_bytes(self, token_id: int) -> bytes:
        return b"\xc3%c" % token_id

    def source_token_bytes(self, token_id: int) -> bytes:
        return b"source %d" % token_id


@pytest.fixture
def answering() -> GenerationAnswers:
    return GenerationAnswers(ServedModel("m", Spelling(), (), "replica"), "call", with_ids=True)


def test_every_finish_reason_of_the_engine_has_the_protocols_name() -> None:
    names = {
        reason.name: common_pb2.FinishReason.Name(FINISH_REASONS[reason]) for reason in FinishReason
    }

    assert names == {name: f"FINISH_REASON_{name}" for name in names}


def test_a_unary_answer_has_everything_of_every_sequence(answering: GenerationAnswers) -> None:
    response = answering.response([FinishedInput((BEAM,), END), FinishedInput((BEAM,), END)])

    assert response.request_id == "call"
    assert (
        list(response.results)
        == [pb.Result(sequences=[AS_SEQUENCE], prompt_logprobs=[AS_MESSAGE])] * 2
    )
    assert as_dict(response.usage) == {
        "input_tokens": 8,
        "output_tokens": 4,
        "cached_input_tokens": 6,
        "discarded_tokens": 12,
    }


def test_alignment_comes_with_the_pieces_of_the_source(answering: GenerationAnswers) -> None:
    end = replace(END, source_ids=(65, 66))

    (result,) = answering.response([FinishedInput((BEAM,), end)]).results
    summary = answering.summary(end).summary

    assert list(result.source_pieces) == list(summary.source_pieces) == [b"source 65", b"source 66"]


def test_ids_of_the_prompt_come_where_they_are_asked_for(answering: GenerationAnswers) -> None:
    end = replace(END, source_ids=(65, 66))
    wanted = replace(answering, with_prompt_ids=True)

    (result,) = wanted.response([FinishedInput((BEAM,), end)]).results
    summary = wanted.summary(end).summary

    assert list(result.prompt_tokens.ids) == list(summary.prompt_tokens.ids) == [65, 66]
    assert not answering.summary(end).summary.HasField("prompt_tokens")


def test_ids_are_left_out_unless_asked_for(answering: GenerationAnswers) -> None:
    without = replace(answering, with_ids=False)

    (result,) = without.response([FinishedInput((BEAM,), END)]).results

    assert not result.sequences[0].HasField("tokens")
    assert result.sequences[0].text == "ab"


def test_a_delta_has_the_log_probabilities_of_its_tokens(answering: GenerationAnswers) -> None:
    message = answering.delta(TextDelta(1, "a", (7,), (POSITION,)))

    assert message is not None
    assert message.delta == pb.GenerateStreamResponse.Delta(
        index=1, text="a", tokens=common_pb2.TokenIds(ids=[7]), logprobs=[AS_MESSAGE]
    )


def test_a_delta_that_shows_the_caller_nothing_is_not_sent(answering: GenerationAnswers) -> None:
    without_ids = replace(answering, with_ids=False)

    assert without_ids.delta(TextDelta(0, "", (7,))) is None
    assert without_ids.delta(TextDelta(0, "", (7,), (POSITION,))) is not None
    assert answering.delta(TextDelta(0, "", (7,))) is not None


def test_the_end_of_what_was_not_streamed_holds_all_of_it(answering: GenerationAnswers) -> None:
    finished = answering.finished(BEAM).finished

    assert finished.sequence == AS_SEQUENCE
    assert (finished.index, finished.stop_token, finished.sum_logprob) == (1, 9, -3)


def test_the_end_of_what_was_streamed_adds_its_alignment_only(answering: GenerationAnswers) -> None:
    streamed = replace(BEAM, was_streamed=True)

    with_alignment = answering.finished(streamed).finished
    without = answering.finished(replace(streamed, alignment=())).finished

    assert with_alignment.sequence == pb.Sequence(
        alignment=AS_SEQUENCE.alignment, alignment_columns=3
    )
    assert not without.HasField("sequence")


def test_the_summary_has_the_log_probabilities_of_the_prompt(answering: GenerationAnswers) -> None:
    summary = answering.summary(END).summary

    assert list(summary.prompt_logprobs) == [AS_MESSAGE]
    assert summary.request_id == "call"
    assert summary.usage.cached_input_tokens == 3


def test_scores_come_in_the_order_of_the_inputs(answering: GenerationAnswers) -> None:
    scores = [
        Score(-2.0, (POSITION,), Usage(3, 0), TIMING),
        Score(-4.0, (POSITION, POSITION), Usage(4, 0), TIMING),
    ]

    response = answering.score_response(scores)

    assert [score.sum_logprob for score in response.scores] == [-2, -4]
    assert [list(score.positions) for score in response.scores] == [
        [AS_MESSAGE],
        [AS_MESSAGE, AS_MESSAGE],
    ]
    assert response.usage.input_tokens == 7
    assert response.provenance.model == "m"
