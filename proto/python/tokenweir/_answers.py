"""Turns the protocol's answers into the client's dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from tokenweir._errors import BrokenStream
from tokenweir._mapping import read
from tokenweir._types import (
    Answers,
    Classification,
    Embedding,
    GeneratedSequence,
    Generation,
    Generations,
    LabelledSpan,
    Labelling,
    ModelInfo,
    PositionLogprobs,
    ReplicaLoad,
    Result,
    Score,
    ScoredLabel,
    ServerInfo,
    TargetScore,
)
from tokenweir.received import SeenMessages, enum_name
from tokenweir.v1 import admin_service_pb2, generation_service_pb2, prediction_service_pb2

T = TypeVar("T")


def generation(response: generation_service_pb2.GenerateResponse) -> Generation:
    """Return the answer for the one input of a request."""
    (result,) = _results(response, 1)
    return read(Generation, response, **vars(result))


def generations(response: generation_service_pb2.GenerateResponse) -> Generations:
    """Return the answers for the inputs of a request, in their order."""
    return read(Generations, response, results=_results(response, len(response.results)))


def score(response: generation_service_pb2.ScoreResponse) -> Score:
    """Return the score of the one target of a request."""
    return read(Score, response, **vars(read(TargetScore, _only(response.scores))))


def classification(response: prediction_service_pb2.ClassifyResponse) -> Classification:
    """Return the classes of the one item of a request."""
    return read(Classification, response, labels=_all(ScoredLabel, _only(response.results).labels))


def labelling(response: prediction_service_pb2.LabelResponse, text: str) -> Labelling:
    """Return the spans of the one item of a request, each with its stretch of `text`."""
    return read(Labelling, response, spans=_spans(_only(response.results), text))


def embedding(response: prediction_service_pb2.EmbedResponse) -> Embedding:
    """Return the vector of the one item of a request."""
    return read(Embedding, response, values=tuple(_only(response.vectors).values))


def scores(response: generation_service_pb2.ScoreResponse) -> Answers[TargetScore]:
    """Return the scores of the targets of a request, in their order."""
    return read(Answers, response, results=_all(TargetScore, response.scores))


def classifications(
    response: prediction_service_pb2.ClassifyResponse,
) -> Answers[tuple[ScoredLabel, ...]]:
    """Return the classes of the items of a request, in their order."""
    results = tuple(_all(ScoredLabel, one.labels) for one in response.results)
    return read(Answers, response, results=results)


def labellings(
    response: prediction_service_pb2.LabelResponse, texts: Sequence[str]
) -> Answers[tuple[LabelledSpan, ...]]:
    """Return the spans of each text of a request, in their order."""
    return read(Answers, response, results=tuple(map(_spans, response.results, texts)))


def embeddings(response: prediction_service_pb2.EmbedResponse) -> Answers[tuple[float, ...]]:
    """Return the vectors of the items of a request, in their order."""
    return read(Answers, response, results=tuple(tuple(one.values) for one in response.vectors))


def model_info(model: admin_service_pb2.ModelInfo) -> ModelInfo:
    """Return what the server says about one model."""
    defaults = sorted(MessageToDict(model.defaults).items())
    return read(ModelInfo, model, defaults={name: _plain(value) for name, value in defaults})


def _plain(value: object) -> object:
    """Return a value of a JSON message, numbers that are whole as int."""
    if isinstance(value, list):
        return tuple(map(_plain, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def server_info(response: admin_service_pb2.GetServerInfoResponse) -> ServerInfo:
    """Return what the server says about itself."""
    return read(ServerInfo, response)


def replica_loads(response: admin_service_pb2.GetLoadResponse) -> tuple[ReplicaLoad, ...]:
    """Return the load of every replica."""
    return _all(ReplicaLoad, response.replicas)


def health_status(response: health_pb2.HealthCheckResponse) -> str:
    """Return the status of grpc.health.v1 by its name."""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


class StreamAssembler:
    """Gathers the messages of one stream of one output into a Generation.

    `feed` takes the messages in their order and returns the text in each; `finish` is called when
    the stream has ended with status OK.
    """

    def __init__(self) -> None:
        self.seen = SeenMessages()
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._finished: generation_service_pb2.GenerateStreamResponse.Finished | None = None
        self._summary: generation_service_pb2.GenerateStreamResponse.Summary | None = None
        self._reasoning = 0

    def feed(self, message: generation_service_pb2.GenerateStreamResponse) -> str:
        """Take the next message; return its text, which may be empty."""
        self.seen.add(message)
        if message.sequence_number != self.seen.num_messages:
            raise BrokenStream(
                f"message {message.sequence_number} came where {self.seen.num_messages} was due"
            )
        if self.seen.num_messages == 1:
            self._reasoning = message.prompt.reasoning
        match message.WhichOneof("event"):
            case "delta":
                self._pieces.append(message.delta.text)
                self._token_ids.extend(message.delta.tokens.ids)
                self._logprobs.extend(_all(PositionLogprobs, message.delta.logprobs))
                return message.delta.text
            case "finished":
                self._finished = message.finished
                return message.finished.sequence.text  # empty if it was streamed
            case "summary":
                self._summary = message.summary
        return ""

    def finish(self) -> Generation:
        """Return the whole answer."""
        if self._finished is None or self._summary is None:
            raise BrokenStream(
                f"the stream ended after {self.seen.num_messages} messages without its "
                f"{'end of the sequence' if self._finished is None else 'summary'}"
            )
        return read(
            Generation,
            self._summary,
            sequences=(self._sequence(self._finished),),
            reasoning=enum_name(generation_service_pb2.Reasoning.DESCRIPTOR, self._reasoning),
        )

    def _sequence(
        self, finished: generation_service_pb2.GenerateStreamResponse.Finished
    ) -> GeneratedSequence:
        if finished.sequence.finish_reason:  # all of it is there: nothing was streamed
            return _sequence(finished.sequence)
        return read(
            GeneratedSequence,
            finished,
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            alignment=_alignment(finished.sequence),
        )


def _results(response: generation_service_pb2.GenerateResponse, count: int) -> tuple[Result, ...]:
    results = response.results
    if len(results) != count or not all(result.sequences for result in results):
        raise BrokenStream(
            f"{len(results)} results came back for {count} prompts, or one without a sequence"
        )
    return tuple(
        read(Result, result, sequences=tuple(map(_sequence, result.sequences)))
        for result in results
    )


def _only(results: Sequence[T]) -> T:
    if len(results) != 1:
        raise BrokenStream(f"{len(results)} results came back for one item")
    return results[0]


def _all(kind: Callable[..., T], messages: Iterable[Message]) -> tuple[T, ...]:
    return tuple(read(kind, one) for one in messages)


def _spans(
    result: prediction_service_pb2.LabelResponse.Spans, text: str
) -> tuple[LabelledSpan, ...]:
    encoded = text.encode()
    return tuple(
        read(
            LabelledSpan,
            span,
            text=encoded[span.start_byte : span.end_byte].decode(errors="replace"),
        )
        for span in result.spans
    )


def _sequence(sequence: generation_service_pb2.Sequence) -> GeneratedSequence:
    return read(GeneratedSequence, sequence, alignment=_alignment(sequence))


def _alignment(sequence: generation_service_pb2.Sequence) -> tuple[tuple[float, ...], ...]:
    """Return the rows of a row-major [generated, source] matrix."""
    values, columns = sequence.alignment, sequence.alignment_columns
    if not values:
        return ()
    if columns < 1 or len(values) % columns:
        raise BrokenStream(f"{len(values)} values of alignment are no rows of {columns}")
    starts = range(0, len(values), columns)
    return tuple(tuple(values[start : start + columns]) for start in starts)
