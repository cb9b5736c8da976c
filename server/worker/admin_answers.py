"""Turns what is known of a model, and how busy it is, into answers and samples of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from google.protobuf.struct_pb2 import Struct
from tokenweir.v1 import admin_service_pb2 as pb

from engine.package.manifest import Certificate, Loss
from engine.requests.load import LoadSnapshot
from server.config import WorkerConfig
from server.telemetry.metrics import Snapshot
from server.wire.work_pb2 import Sample
from server.worker.answers import ServedModel
from server.worker.engines import Engine


def model_info(
    model: ServedModel[Engine],
    *,
    state: pb.ModelState.ValueType,
    message: str,
    config: WorkerConfig,
) -> pb.ModelInfo:
    """Return what a client may know of a model."""
    package, defaults = model.engine.package, Struct()
    manifest = package.manifest
    given = manifest.defaults.given
    defaults.update(manifest.defaults.model_dump(mode="json", include={*given}))
    return pb.ModelInfo(
        model=model.name,
        model_version=manifest.version,
        state=state,
        message=message,
        architecture=manifest.architecture,
        capabilities=model.capabilities,
        limits=_limits(model, config),
        manifest_sha256=package.manifest_sha256,
        parity=_parity(manifest.certificate, manifest.toolchain),
        labels=manifest.labels,
        device=model.engine.device,
        precision=manifest.precision,
        defaults=defaults,
    )


def replica_load(
    load: LoadSnapshot, *, model: str, replica_id: str
) -> pb.GetLoadResponse.ReplicaLoad:
    """Return how busy a model is on this replica."""
    return pb.GetLoadResponse.ReplicaLoad(
        replica_id=replica_id,
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        cache_used=load.cache_used,
        tokens_per_second=load.tokens_per_second,
        model=model,
        wasted=pb.GetLoadResponse.WastedWork(**asdict(load.wasted)),
    )


def engine_samples(engines: Mapping[str, Engine]) -> list[Sample]:
    """Return the samples of engines, by the name of their model, for the wire."""
    return [
        Sample(name=name, labels=labels, values=value if isinstance(value, list) else [value])
        for model, engine in engines.items()
        for name, labels, value in _samples(model, engine)
    ]


def _samples(model: str, engine: Engine) -> Snapshot:
    load, measures, labels = engine.load(), engine.measures, (model,)
    return [
        ("num_sequences_running", labels, load.running),
        ("num_requests_waiting", labels, load.waiting),
        ("num_tokens_waiting", labels, load.waiting_tokens),
        ("kv_cache_usage_perc", labels, load.cache_used),
        ("inter_token_latency_seconds", labels, measures.inter_token.counts()),
        ("step_seconds", labels, measures.seconds.counts()),
        ("step_batch_size", labels, measures.batch_size.counts()),
        *(
            ("wasted_tokens", (model, kind.removesuffix("_tokens")), count)
            for kind, count in asdict(load.wasted).items()
        ),
    ]


def _limits(model: ServedModel[Engine], limits: WorkerConfig) -> pb.Limits:
    manifest = model.engine.package.manifest
    message = pb.Limits(max_inputs=limits.max_inputs, max_request_bytes=limits.max_request_bytes)
    if manifest.encoding is not None:
        message.max_input_tokens = manifest.encoding.max_len
    if manifest.generation is not None:
        cache, cross_cache = manifest.generation.cache, manifest.generation.cross_cache
        # A prompt (without an encoder) or the start token takes at least one of the positions.
        message.max_output_tokens = cache.max_len - 1
        message.max_input_tokens = cross_cache.max_len if cross_cache else cache.max_len - 1
        message.max_num_outputs = limits.max_num_outputs
        message.max_stop_strings = limits.max_stop_strings
        if "beam" in model.capabilities:
            message.max_beam_width = limits.max_beam_width
        if {"logprobs", "prompt_logprobs", "score"} & {*model.capabilities}:
            message.max_logprobs = limits.max_logprobs
    return message


def _parity(certificate: Certificate, toolchain: dict[str, str]) -> pb.ParityCertificate:
    answers = certificate.answers
    return pb.ParityCertificate(
        cases=certificate.cases,
        tokens_compared=certificate.tokens_compared,
        tokens_equal=certificate.tokens_equal,
        max_abs_logit_diff=certificate.max_abs_logit_diff,
        tolerance=certificate.tolerance,
        dtype=certificate.dtype,
        toolchain=toolchain,
        batch_invariant=certificate.shows_invariance,
        text_quality=_text_quality(certificate.loss),
        proof=certificate.proof,
        losses=[
            pb.ParityLoss(
                play=judged.play,
                what=judged.what,
                positions=judged.positions,
                median=judged.exported.median,
                largest=judged.exported.largest,
                eager_median=judged.eager.median,
                eager_largest=judged.eager.largest,
            )
            for judged in certificate.judged
        ],
        largest_float16=certificate.largest_float16,
        original=certificate.original,
        answers=None
        if answers is None
        else pb.ParityAnswers(**answers.model_dump(exclude_none=True)),
    )


def _text_quality(loss: Loss | None) -> pb.TextQuality | None:
    if loss is None or not loss.text_lines:
        return None
    return pb.TextQuality(
        lines=loss.text_lines,
        chrf=loss.chrf,
        eager_chrf=loss.eager_chrf,
        chrf_between=loss.chrf_between,
    )
