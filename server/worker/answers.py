"""Turns predictions, counts, times and what is known of a model into the protocol's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.duration_pb2 import Duration
from numpy.typing import NDArray
from tokenweir.v1 import admin_service_pb2, common_pb2, prediction_service_pb2

from engine.config import RequestLimits
from engine.one_pass.prediction import ItemPrediction
from engine.package.manifest import Certificate
from engine.package.package import Package
from engine.requests.events import Timing, Usage
from engine.requests.load import LoadSnapshot


@dataclass(frozen=True)
class ServedModel:
    """What an answer says of the model that gave it."""

    name: str  # under which it is served; its package may call it otherwise
    package: Package
    capabilities: tuple[str, ...]
    replica_id: str
    device: str = "cpu"  # where it runs; of a GPU its name


def classes(
    item: ItemPrediction, labels: Sequence[str], top: int | None
) -> prediction_service_pb2.ClassifyResponse.Classes:
    """Return the `top` best classes, all for 0, the best one for None."""
    probabilities = softmax(item.logits)  # (num_labels,)
    count = 1 if top is None else top or len(probabilities)
    best = np.argsort(-probabilities, kind="stable")[:count]
    return prediction_service_pb2.ClassifyResponse.Classes(
        labels=[_scored_label(int(i), float(probabilities[i]), labels) for i in best]
    )


def spans(
    item: ItemPrediction, labels: Sequence[str]
) -> prediction_service_pb2.LabelResponse.Spans:
    """Return the best label of every token."""
    probabilities = softmax(item.logits)  # (num_tokens, num_labels)
    best = probabilities.argmax(axis=-1)  # (num_tokens,)
    return prediction_service_pb2.LabelResponse.Spans(
        spans=[
            prediction_service_pb2.LabelResponse.Span(
                start_byte=start,
                end_byte=end,
                label=_scored_label(int(label), float(row[label]), labels),
            )
            for (start, end), row, label in zip(item.spans, probabilities, best, strict=True)
        ]
    )


def vector(item: ItemPrediction, *, normalize: bool) -> prediction_service_pb2.EmbedResponse.Vector:
    """Return the embedding, of length 1 if asked for."""
    values = item.embedding.astype(np.float64)
    length = float(np.linalg.norm(values))
    if normalize and length > 0:
        values = values / length
    return prediction_service_pb2.EmbedResponse.Vector(values=values.tolist())


def prediction_usage(items: Sequence[ItemPrediction]) -> common_pb2.Usage:
    """Return what a prediction consumed."""
    return common_pb2.Usage(input_tokens=sum(item.input_tokens for item in items))


def provenance(
    model: ServedModel, *, seed: int = 0, may_vary: bool = False
) -> common_pb2.Provenance:
    """Return what answered; with `may_vary` the caller asked for no more than best effort."""
    manifest = model.package.manifest
    is_invariant = "batch_invariant" in model.capabilities and not may_vary
    return common_pb2.Provenance(
        model=model.name,
        model_version=manifest.version,
        manifest_sha256=model.package.manifest_sha256,
        seed=seed,
        determinism=common_pb2.DETERMINISM_BATCH_INVARIANT
        if is_invariant
        else common_pb2.DETERMINISM_BEST_EFFORT,
        replica_id=model.replica_id,
    )


def usage(parts: Sequence[Usage]) -> common_pb2.Usage:
    """Return what all inputs of a call consumed together."""
    return common_pb2.Usage(
        input_tokens=sum(part.input_tokens for part in parts),
        cached_input_tokens=sum(part.cached_input_tokens for part in parts),
        output_tokens=sum(part.output_tokens for part in parts),
        discarded_tokens=sum(part.discarded_tokens for part in parts),
    )


def timing(parts: Sequence[Timing]) -> common_pb2.Timing:
    """Return the times of a call: of several inputs the longest, of batch sizes the mean."""
    steps = sum(part.steps for part in parts)
    shared = sum(part.steps * part.mean_batch_size for part in parts)
    return common_pb2.Timing(
        queue=_duration(max(part.queue for part in parts)),
        prefill=_duration(max(part.prefill for part in parts)),
        decode=_duration(max(part.decode for part in parts)),
        time_to_first_token=_duration(max(part.time_to_first_token for part in parts)),
        steps=max(part.steps for part in parts),
        mean_batch_size=shared / steps if steps else 0.0,
    )


def model_info(
    model: ServedModel,
    *,
    state: admin_service_pb2.ModelState.ValueType,
    message: str,
    limits: RequestLimits,
    max_request_bytes: int,
) -> admin_service_pb2.ModelInfo:
    """Return what a client may know of a model."""
    manifest = model.package.manifest
    return admin_service_pb2.ModelInfo(
        model=model.name,
        model_version=manifest.version,
        state=state,
        message=message,
        architecture=manifest.architecture,
        capabilities=model.capabilities,
        limits=_limits(model, limits, max_request_bytes),
        manifest_sha256=model.package.manifest_sha256,
        parity=_parity(manifest.certificate, manifest.toolchain),
        labels=manifest.labels,
        device=model.device,
        precision=manifest.precision,
    )


def replica_load(
    load: LoadSnapshot, *, model: str, replica_id: str
) -> admin_service_pb2.GetLoadResponse.ReplicaLoad:
    """Return how busy a model is on this replica."""
    return admin_service_pb2.GetLoadResponse.ReplicaLoad(
        replica_id=replica_id,
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        cache_used=load.cache_used,
        tokens_per_second=load.tokens_per_second,
        model=model,
        wasted=admin_service_pb2.GetLoadResponse.WastedWork(
            padding_tokens=load.wasted.padding_tokens,
            cancelled_tokens=load.wasted.cancelled_tokens,
            expired_tokens=load.wasted.expired_tokens,
            failed_tokens=load.wasted.failed_tokens,
            discarded_tokens=load.wasted.discarded_tokens,
        ),
    )


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return probabilities over the last axis; shape as given."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    probabilities: NDArray[np.float64] = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def _scored_label(
    index: int, probability: float, labels: Sequence[str]
) -> prediction_service_pb2.ScoredLabel:
    name = labels[index] if index < len(labels) else str(index)
    return prediction_service_pb2.ScoredLabel(label=name, probability=probability, index=index)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _limits(
    model: ServedModel, limits: RequestLimits, max_request_bytes: int
) -> admin_service_pb2.Limits:
    manifest = model.package.manifest
    message = admin_service_pb2.Limits(
        max_inputs=limits.max_inputs, max_request_bytes=max_request_bytes
    )
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


def _parity(
    certificate: Certificate, toolchain: dict[str, str]
) -> admin_service_pb2.ParityCertificate:
    return admin_service_pb2.ParityCertificate(
        cases=certificate.cases,
        tokens_compared=certificate.tokens_compared,
        tokens_equal=certificate.tokens_equal,
        max_abs_logit_diff=certificate.max_abs_logit_diff,
        tolerance=certificate.tolerance,
        dtype=certificate.dtype,
        toolchain=toolchain,
        batch_invariant=certificate.shows_invariance,
    )
