"""Turns the protocol's answers into the client's dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import Any, TypeVar

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from tokenweir._errors import BrokenStream
from tokenweir._types import (
    Answers,
    Classification,
    Comparison,
    Difference,
    Embedding,
    GeneratedSequence,
    Generation,
    Generations,
    LabelledSpan,
    Labelling,
    ModelInfo,
    ModelLimits,
    ParityAnswers,
    ParityCertificate,
    ParityLoss,
    PositionLogprobs,
    Provenance,
    ReplicaInfo,
    ReplicaLoad,
    Result,
    Score,
    ScoredLabel,
    ServerInfo,
    TargetScore,
    TextQuality,
    Timing,
    TokenLogprob,
    Usage,
    VersionTraffic,
    WastedWork,
)
from tokenweir.received import ReceivedSequence
from tokenweir.v1 import (
    admin_service_pb2,
    common_pb2,
    generation_service_pb2,
    prediction_service_pb2,
)

T = TypeVar("T")


def generation(response: generation_service_pb2.GenerateResponse) -> Generation:
    """Return the answer for the one input of a request."""
    (result,) = _results(response, 1)
    return Generation(
        request_id=response.request_id,
        sequences=result.sequences,
        usage=_usage(response.usage),
        timing=_timing(response.timing),
        provenance=_provenance(response.provenance),
        prompt_logprobs=result.prompt_logprobs,
        source_pieces=result.source_pieces,
    )


def generations(response: generation_service_pb2.GenerateResponse) -> Generations:
    """Return the answers for the inputs of a request, in their order."""
    return Generations(
        request_id=response.request_id,
        results=_results(response, len(response.results)),
        usage=_usage(response.usage),
        timing=_timing(response.timing),
        provenance=_provenance(response.provenance),
    )


def score(response: generation_service_pb2.ScoreResponse) -> Score:
    """Return the score of the one target of a request."""
    if len(response.scores) != 1:
        raise BrokenStream(f"{len(response.scores)} scores came back for one target")
    return Score(
        sum_logprob=response.scores[0].sum_logprob,
        positions=_positions(response.scores[0].positions),
        usage=_usage(response.usage),
        timing=_timing(response.timing),
        provenance=_provenance(response.provenance),
        request_id=response.request_id,
    )


def classification(response: prediction_service_pb2.ClassifyResponse) -> Classification:
    """Return the classes of the one item of a request."""
    return Classification(
        labels=_classes(_only(response.results)),
        usage=_usage(response.usage),
        timing=_timing(response.timing),
        provenance=_provenance(response.provenance),
        request_id=response.request_id,
    )


def labelling(response: prediction_service_pb2.LabelResponse, text: str) -> Labelling:
    """Return the spans of the one item of a request, each with its stretch of `text`."""
    return Labelling(
        spans=_spans(_only(response.results), text),
        usage=_usage(response.usage),
        timing=_timing(response.timing),
        provenance=_provenance(response.provenance),
        request_id=response.request_id,
    )


def embedding(response: prediction_service_pb2.EmbedResponse) -> Embedding:
    """Return the vector of the one item of a request."""
    return Embedding(
        values=tuple(_only(response.vectors).values),
        usage=_usage(response.usage),
        timing=_timing(response.timing),
        provenance=_provenance(response.provenance),
        request_id=response.request_id,
    )


def scores(response: generation_service_pb2.ScoreResponse) -> Answers[TargetScore]:
    """Return the scores of the targets of a request, in their order."""
    found = [TargetScore(one.sum_logprob, _positions(one.positions)) for one in response.scores]
    return _answers(response, found)


def classifications(
    response: prediction_service_pb2.ClassifyResponse,
) -> Answers[tuple[ScoredLabel, ...]]:
    """Return the classes of the items of a request, in their order."""
    return _answers(response, [_classes(one) for one in response.results])


def labellings(
    response: prediction_service_pb2.LabelResponse, texts: Sequence[str]
) -> Answers[tuple[LabelledSpan, ...]]:
    """Return the spans of each text of a request, in their order."""
    return _answers(response, [_spans(*pair) for pair in zip(response.results, texts, strict=True)])


def embeddings(response: prediction_service_pb2.EmbedResponse) -> Answers[tuple[float, ...]]:
    """Return the vectors of the items of a request, in their order."""
    return _answers(response, [tuple(one.values) for one in response.vectors])


def model_info(model: admin_service_pb2.ModelInfo) -> ModelInfo:
    """Return what the server says about one model."""
    limits = model.limits
    return ModelInfo(
        model=model.model,
        model_version=model.model_version,
        state=_enum_name(admin_service_pb2.ModelState.DESCRIPTOR, model.state, "MODEL_STATE_"),
        message=model.message,
        architecture=model.architecture,
        capabilities=tuple(model.capabilities),
        limits=ModelLimits(
            max_input_tokens=limits.max_input_tokens,
            max_output_tokens=limits.max_output_tokens,
            max_inputs=limits.max_inputs,
            max_beam_width=limits.max_beam_width,
            max_num_outputs=limits.max_num_outputs,
            max_stop_strings=limits.max_stop_strings,
            max_logprobs=limits.max_logprobs,
            max_request_bytes=limits.max_request_bytes,
        ),
        manifest_sha256=model.manifest_sha256.hex(),
        parity=_parity(model.parity) if model.HasField("parity") else None,
        labels=tuple(model.labels),
        device=model.device,
        precision=model.precision,
        defaults={
            name: _plain(value) for name, value in sorted(MessageToDict(model.defaults).items())
        },
        traffic=_traffic(model.traffic) if model.HasField("traffic") else None,
    )


def _traffic(traffic: admin_service_pb2.VersionTraffic) -> VersionTraffic:
    comparisons = map(_comparison, traffic.comparisons)
    return VersionTraffic(traffic.share, traffic.replicas, tuple(comparisons))


def _comparison(one: admin_service_pb2.Comparison) -> Comparison:
    found = one.first_difference if one.HasField("first_difference") else None
    return Comparison(
        model_version=one.model_version,
        equal=one.equal,
        different=one.different,
        failed=one.failed,
        first_difference=found
        and Difference(found.request_id, found.input, found.output, found.token),
        largest_distance=one.largest_distance,
    )


def _plain(value: object) -> object:
    """Return a value of a JSON message, numbers that are whole as int."""
    if isinstance(value, list):
        return tuple(map(_plain, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def server_info(response: admin_service_pb2.GetServerInfoResponse) -> ServerInfo:
    """Return what the server says about itself."""
    return ServerInfo(
        version=response.version,
        api_minor=response.api_minor,
        instance_id=response.instance_id,
        start_time=response.start_time.ToDatetime(tzinfo=UTC),
        features=tuple(response.features),
        replicas=tuple(
            ReplicaInfo(one.replica_id, one.version, one.start_time.ToDatetime(tzinfo=UTC))
            for one in response.replicas
        ),
    )


def replica_loads(response: admin_service_pb2.GetLoadResponse) -> tuple[ReplicaLoad, ...]:
    """Return the load of every replica."""
    return tuple(
        ReplicaLoad(
            replica_id=replica.replica_id,
            model=replica.model,
            running=replica.running,
            waiting=replica.waiting,
            waiting_tokens=replica.waiting_tokens,
            cache_used=replica.cache_used,
            tokens_per_second=replica.tokens_per_second,
            wasted=WastedWork(
                padding_tokens=replica.wasted.padding_tokens,
                cancelled_tokens=replica.wasted.cancelled_tokens,
                expired_tokens=replica.wasted.expired_tokens,
                failed_tokens=replica.wasted.failed_tokens,
                discarded_tokens=replica.wasted.discarded_tokens,
                preempted_tokens=replica.wasted.preempted_tokens,
            ),
        )
        for replica in response.replicas
    )


def health_status(response: health_pb2.HealthCheckResponse) -> str:
    """Return the status of grpc.health.v1 by its name."""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


class StreamAssembler:
    """Gathers the messages of one stream of one output into a Generation.

    `feed` takes the messages in their order and returns the text in each; `finish` is called when
    the stream has ended with status OK.
    """

    def __init__(self) -> None:
        self.num_messages = 0
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._finished: generation_service_pb2.GenerateStreamResponse.Finished | None = None
        self._summary: generation_service_pb2.GenerateStreamResponse.Summary | None = None

    def feed(self, message: generation_service_pb2.GenerateStreamResponse) -> str:
        """Take the next message; return its text, which may be empty."""
        self.num_messages += 1
        if message.sequence_number != self.num_messages:
            raise BrokenStream(
                f"message {message.sequence_number} came where {self.num_messages} was due"
            )
        match message.WhichOneof("event"):
            case "delta":
                self._pieces.append(message.delta.text)
                self._token_ids.extend(message.delta.tokens.ids)
                self._logprobs.extend(_positions(message.delta.logprobs))
                return message.delta.text
            case "finished":
                self._finished = message.finished
                return message.finished.sequence.text  # empty if it was streamed
            case "summary":
                self._summary = message.summary
        return ""

    def received(self) -> list[generation_service_pb2.Received]:
        """Return how much has come, for a server to go on behind it."""
        if not self.num_messages:
            return []
        sequence = ReceivedSequence()
        logprobs = [_position_bytes(one) for one in self._logprobs]
        sequence.add("".join(self._pieces).encode(), self._token_ids, logprobs)
        if self._finished is not None:
            sequence.end = self._finished.SerializeToString()
        return [sequence.message(0)]

    def finish(self) -> Generation:
        """Return the whole answer."""
        if self._finished is None or self._summary is None:
            raise BrokenStream(
                f"the stream ended after {self.num_messages} messages without its "
                f"{'end of the sequence' if self._finished is None else 'summary'}"
            )
        return Generation(
            request_id=self._summary.request_id,
            sequences=(self._sequence(self._finished),),
            usage=_usage(self._summary.usage),
            timing=_timing(self._summary.timing),
            provenance=_provenance(self._summary.provenance),
            prompt_logprobs=_positions(self._summary.prompt_logprobs),
            source_pieces=tuple(self._summary.source_pieces),
        )

    def _sequence(
        self, finished: generation_service_pb2.GenerateStreamResponse.Finished
    ) -> GeneratedSequence:
        if finished.sequence.finish_reason:  # all of it is there: nothing was streamed
            return _sequence(finished.sequence)
        return GeneratedSequence(
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            finish_reason=finish_reason(finished.finish_reason),
            matched_stop=_matched_stop(finished),
            sum_logprob=finished.sum_logprob,
            logprobs=tuple(self._logprobs),
            alignment=_alignment(finished.sequence),
        )


def finish_reason(value: int) -> str:
    """Return the protocol's reason in small letters, as "eos"."""
    return _enum_name(common_pb2.FinishReason.DESCRIPTOR, value, "FINISH_REASON_")


def _results(response: generation_service_pb2.GenerateResponse, count: int) -> tuple[Result, ...]:
    results = response.results
    if len(results) != count or not all(result.sequences for result in results):
        raise BrokenStream(
            f"{len(results)} results came back for {count} prompts, or one without a sequence"
        )
    return tuple(
        Result(
            sequences=tuple(map(_sequence, result.sequences)),
            prompt_logprobs=_positions(result.prompt_logprobs),
            source_pieces=tuple(result.source_pieces),
        )
        for result in results
    )


def _only(results: Sequence[T]) -> T:
    if len(results) != 1:
        raise BrokenStream(f"{len(results)} results came back for one item")
    return results[0]


def _answers(
    response: generation_service_pb2.ScoreResponse
    | prediction_service_pb2.ClassifyResponse
    | prediction_service_pb2.LabelResponse
    | prediction_service_pb2.EmbedResponse,
    results: Sequence[T],
) -> Answers[T]:
    return Answers(
        results=tuple(results),
        usage=_usage(response.usage),
        timing=_timing(response.timing),
        provenance=_provenance(response.provenance),
        request_id=response.request_id,
    )


def _classes(result: prediction_service_pb2.ClassifyResponse.Classes) -> tuple[ScoredLabel, ...]:
    return tuple(map(_scored_label, result.labels))


def _spans(
    result: prediction_service_pb2.LabelResponse.Spans, text: str
) -> tuple[LabelledSpan, ...]:
    encoded = text.encode()
    return tuple(
        LabelledSpan(
            text=encoded[span.start_byte : span.end_byte].decode(errors="replace"),
            start_byte=span.start_byte,
            end_byte=span.end_byte,
            label=_scored_label(span.label),
        )
        for span in result.spans
    )


def _sequence(sequence: generation_service_pb2.Sequence) -> GeneratedSequence:
    return GeneratedSequence(
        text=sequence.text,
        token_ids=tuple(sequence.tokens.ids),
        finish_reason=finish_reason(sequence.finish_reason),
        matched_stop=_matched_stop(sequence),
        sum_logprob=sequence.sum_logprob,
        score=sequence.score,
        logprobs=_positions(sequence.logprobs),
        alignment=_alignment(sequence),
    )


def _alignment(sequence: generation_service_pb2.Sequence) -> tuple[tuple[float, ...], ...]:
    """Return the rows of a row-major [generated, source] matrix."""
    values, columns = sequence.alignment, sequence.alignment_columns
    if not values:
        return ()
    if columns < 1 or len(values) % columns:
        raise BrokenStream(f"{len(values)} values of alignment are no rows of {columns}")
    starts = range(0, len(values), columns)
    return tuple(tuple(values[start : start + columns]) for start in starts)


def _positions(
    positions: Sequence[common_pb2.PositionLogprobs],
) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(_token(one.chosen), tuple(map(_token, one.top))) for one in positions
    )


def _token(token: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token.id, token.piece, token.logprob, token.rank)


def _position_bytes(position: PositionLogprobs) -> bytes:
    """Return the bytes that it came as."""
    chosen, *top = (
        common_pb2.TokenLogprob(
            id=token.token_id, piece=token.piece, logprob=token.logprob, rank=token.rank
        )
        for token in (position.chosen, *position.top)
    )
    return common_pb2.PositionLogprobs(chosen=chosen, top=top).SerializeToString()


def _matched_stop(
    end: generation_service_pb2.Sequence | generation_service_pb2.GenerateStreamResponse.Finished,
) -> str | int | None:
    match end.WhichOneof("matched_stop"):
        case "stop_string":
            return end.stop_string
        case "stop_token":
            return end.stop_token
        case _:
            return None


def _scored_label(label: prediction_service_pb2.ScoredLabel) -> ScoredLabel:
    return ScoredLabel(label.label, label.probability, label.index)


def _usage(usage: common_pb2.Usage) -> Usage:
    return Usage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cached_input_tokens=usage.cached_input_tokens,
        discarded_tokens=usage.discarded_tokens,
    )


def _timing(timing: common_pb2.Timing) -> Timing:
    return Timing(
        queue=timing.queue.ToTimedelta().total_seconds(),
        prefill=timing.prefill.ToTimedelta().total_seconds(),
        decode=timing.decode.ToTimedelta().total_seconds(),
        time_to_first_token=timing.time_to_first_token.ToTimedelta().total_seconds(),
        steps=timing.steps,
        mean_batch_size=timing.mean_batch_size,
    )


def _provenance(provenance: common_pb2.Provenance) -> Provenance:
    return Provenance(
        model=provenance.model,
        model_version=provenance.model_version,
        manifest_sha256=provenance.manifest_sha256.hex(),
        seed=provenance.seed,
        determinism=_enum_name(
            common_pb2.Determinism.DESCRIPTOR, provenance.determinism, "DETERMINISM_"
        ),
        replica_id=provenance.replica_id,
        server_version=provenance.server_version,
        processor=provenance.processor,
        threads=provenance.threads,
    )


def _parity(parity: admin_service_pb2.ParityCertificate) -> ParityCertificate:
    return ParityCertificate(
        cases=parity.cases,
        tokens_compared=parity.tokens_compared,
        tokens_equal=parity.tokens_equal,
        max_abs_logit_diff=parity.max_abs_logit_diff,
        tolerance=parity.tolerance,
        dtype=parity.dtype,
        toolchain=dict(parity.toolchain),
        batch_invariant=parity.batch_invariant,
        text_quality=TextQuality(**_fields(parity.text_quality))
        if parity.HasField("text_quality")
        else None,
        proof=parity.proof,
        losses=tuple(ParityLoss(**_fields(loss)) for loss in parity.losses),
        answers=ParityAnswers(**_fields(parity.answers)) if parity.HasField("answers") else None,
        largest_float16=parity.largest_float16 if parity.HasField("largest_float16") else None,
        original=parity.original,
    )


def _fields(message: Message) -> dict[str, Any]:
    """Return the fields of a message by name; None for one that is absent."""
    return {
        field.name: getattr(message, field.name)
        if not field.has_presence or message.HasField(field.name)
        else None
        for field in message.DESCRIPTOR.fields
    }


def _enum_name(enum: EnumDescriptor, value: int, prefix: str) -> str:
    """Return the name of a value in small letters; the number of one newer than this client."""
    known = enum.values_by_number.get(value)
    return known.name.removeprefix(prefix).lower() if known else str(value)
