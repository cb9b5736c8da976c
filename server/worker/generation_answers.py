"""Turns what a generating engine gives for one call into the protocol's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenweir.received import ORIGIN_KEY
from tokenweir.v1 import common_pb2
from tokenweir.v1 import generation_service_pb2 as pb

from engine.requests.events import (
    Admitted,
    FinishReason,
    PositionLogprobs,
    RequestFinished,
    Score,
    SequenceFinished,
    TextDelta,
    TokenLogprob,
)
from engine.requests.request import Reasoning
from server.api import REPLICA_KEY
from server.worker.answers import (
    ServedModel,
    is_invariant,
    origin,
    provenance,
    timing,
    usage,
)
from server.worker.engines import GeneratingEngine

FINISH_REASONS = {
    FinishReason.EOS: common_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_FULL: common_pb2.FINISH_REASON_CONTEXT_FULL,
    FinishReason.DRAINED: common_pb2.FINISH_REASON_DRAINED,
    FinishReason.DEADLINE: common_pb2.FINISH_REASON_DEADLINE,
}


_REASONING: Mapping[Reasoning | None, pb.Reasoning.ValueType] = {
    None: pb.REASONING_UNSPECIFIED,
    "marked": pb.REASONING_MARKED,
    "begun": pb.REASONING_BEGUN,
}


@dataclass(frozen=True)
class FinishedInput:
    """Everything that one input of a unary call gave."""

    sequences: tuple[SequenceFinished, ...]  # by index
    end: RequestFinished


@dataclass(frozen=True)
class GenerationAnswers:
    """Makes the messages that answer one call."""

    model: ServedModel[GeneratingEngine]
    request_id: str
    with_ids: bool = False
    with_prompt_ids: bool = False
    may_vary: bool = False  # the caller asked for no more than best effort

    def beginning(self, seed: int | None) -> tuple[tuple[str, str], ...]:
        """Return the initial metadata of a stream; what can come again says where it is from."""
        replica = (REPLICA_KEY, self.model.replica_id)
        if not is_invariant(self.model, may_vary=self.may_vary):
            return (replica,)
        return (replica, (ORIGIN_KEY, origin(self.model, seed)))

    def response(self, results: Sequence[FinishedInput]) -> pb.GenerateResponse:
        """Return the answer to Generate; results are in the order of the inputs."""
        return pb.GenerateResponse(
            request_id=self.request_id,
            results=[
                pb.Result(
                    sequences=[self._sequence(one) for one in result.sequences],
                    prompt_logprobs=self._positions(result.end.prompt_logprobs),
                    source_pieces=self._source_pieces(result.end),
                    prompt_tokens=self._prompt_tokens(result.end),
                    reasoning=_REASONING[result.end.reasoning],
                )
                for result in results
            ],
            usage=usage([result.end.usage for result in results]),
            timing=timing([result.end.timing for result in results]),
            provenance=self._provenance(results[0].end.seed),
        )

    def prompt(self, admitted: Admitted) -> pb.GenerateStreamResponse.Prompt:
        """Return what a stream says of its prompt."""
        ids = common_pb2.TokenIds(ids=admitted.prompt_ids) if self.with_prompt_ids else None
        return pb.GenerateStreamResponse.Prompt(
            input_tokens=admitted.num_input_tokens,
            tokens=ids,
            reasoning=_REASONING[admitted.reasoning],
        )

    def message(
        self, event: TextDelta | SequenceFinished | RequestFinished
    ) -> pb.GenerateStreamResponse | None:
        """Return what a stream says of an event; None where the caller would see nothing of it."""
        match event:
            case TextDelta():
                return self.delta(event)
            case SequenceFinished():
                return self.finished(event)
            case RequestFinished():
                return self.summary(event)

    def delta(self, event: TextDelta) -> pb.GenerateStreamResponse | None:
        """Return more of a sequence; None where the caller would see nothing of it."""
        if not (event.text or event.logprobs or (self.with_ids and event.token_ids)):
            return None
        message = pb.GenerateStreamResponse()
        delta = message.delta  # every look makes an object
        delta.text = event.text
        if event.index:
            delta.index = event.index
        if self.with_ids:
            delta.tokens.ids.extend(event.token_ids)
        if event.logprobs:
            delta.logprobs.extend(self._positions(event.logprobs))
        return message

    def finished(self, event: SequenceFinished) -> pb.GenerateStreamResponse:
        """Return the end of a sequence, with all of it where nothing was streamed."""
        message = pb.GenerateStreamResponse.Finished(
            index=event.index,
            finish_reason=FINISH_REASONS[event.reason],
            sum_logprob=event.sum_logprob,
        )
        _set_matched_stop(message, event.matched_stop)
        if not event.was_streamed:
            message.sequence.CopyFrom(self._sequence(event))
        elif event.alignment:
            _set_alignment(message.sequence, event)
        return pb.GenerateStreamResponse(finished=message)

    def summary(self, event: RequestFinished) -> pb.GenerateStreamResponse:
        """Return the end of a stream."""
        return pb.GenerateStreamResponse(
            summary=pb.GenerateStreamResponse.Summary(
                usage=usage([event.usage]),
                timing=timing([event.timing]),
                provenance=self._provenance(event.seed),
                prompt_logprobs=self._positions(event.prompt_logprobs),
                request_id=self.request_id,
                source_pieces=self._source_pieces(event),
                prompt_tokens=self._prompt_tokens(event),
            )
        )

    def score_response(self, scores: Sequence[Score]) -> pb.ScoreResponse:
        """Return the answer to Score; scores are in the order of the inputs."""
        return pb.ScoreResponse(
            scores=[
                pb.ScoreResponse.Score(
                    sum_logprob=score.sum_logprob, positions=self._positions(score.positions)
                )
                for score in scores
            ],
            usage=usage([score.usage for score in scores]),
            timing=timing([score.timing for score in scores]),
            provenance=self._provenance(0),
            request_id=self.request_id,
        )

    def _sequence(self, event: SequenceFinished) -> pb.Sequence:
        message = pb.Sequence(
            text=event.text,
            logprobs=self._positions(event.logprobs),
            finish_reason=FINISH_REASONS[event.reason],
            score=event.score,
            sum_logprob=event.sum_logprob,
        )
        if self.with_ids:
            message.tokens.ids.extend(event.token_ids)
        _set_matched_stop(message, event.matched_stop)
        _set_alignment(message, event)
        return message

    def _source_pieces(self, event: RequestFinished) -> list[bytes]:
        return [self.model.engine.source_token_bytes(token_id) for token_id in event.source_ids]

    def _prompt_tokens(self, event: RequestFinished) -> common_pb2.TokenIds | None:
        return common_pb2.TokenIds(ids=event.source_ids) if self.with_prompt_ids else None

    def _positions(
        self, positions: Sequence[PositionLogprobs]
    ) -> list[common_pb2.PositionLogprobs]:
        return [
            common_pb2.PositionLogprobs(
                chosen=self._token(one.chosen), top=[self._token(token) for token in one.top]
            )
            for one in positions
        ]

    def _token(self, token: TokenLogprob) -> common_pb2.TokenLogprob:
        return common_pb2.TokenLogprob(
            id=token.token_id,
            piece=self.model.engine.token_bytes(token.token_id),
            logprob=token.logprob,
            rank=token.rank,
        )

    def _provenance(self, seed: int) -> common_pb2.Provenance:
        return provenance(self.model, seed=seed, may_vary=self.may_vary)


def _set_matched_stop(
    message: pb.Sequence | pb.GenerateStreamResponse.Finished, matched: str | int | None
) -> None:
    match matched:
        case str():
            message.stop_string = matched
        case int():
            message.stop_token = matched


def _set_alignment(message: pb.Sequence, event: SequenceFinished) -> None:
    for row in event.alignment:  # one target token, over the source
        message.alignment.extend(row)
        message.alignment_columns = len(row)
