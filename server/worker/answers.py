"""Parts common to all answers of a model: provenance, usage and timing, and a call's record."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Generic, TypeVar

from google.protobuf.duration_pb2 import Duration
from tokenweir.v1 import common_pb2

from engine.machine import processor_kind
from engine.requests.events import GenerationEvent, RequestFinished, SequenceFinished, Timing, Usage
from server.api import RELEASE
from server.wire.work_pb2 import Record
from server.worker.checks import BATCH_INVARIANT
from server.worker.engines import Engine

EngineT = TypeVar("EngineT", bound=Engine, covariant=True)


@dataclass(frozen=True)
class ServedModel(Generic[EngineT]):
    """A model of a replica with its engine, which may tell its capabilities slowly."""

    name: str  # under which it is served; its package may call it otherwise
    engine: EngineT
    capabilities: tuple[str, ...]
    replica_id: str


def provenance(
    model: ServedModel[Engine], *, seed: int = 0, may_vary: bool = False
) -> common_pb2.Provenance:
    """Return what answered; with `may_vary` the caller asked for no more than best effort."""
    engine, package = model.engine, model.engine.package
    return common_pb2.Provenance(
        model=model.name,
        model_version=package.manifest.version,
        manifest_sha256=package.manifest_sha256,
        seed=seed,
        determinism=common_pb2.DETERMINISM_BATCH_INVARIANT
        if is_invariant(model, may_vary=may_vary)
        else common_pb2.DETERMINISM_BEST_EFFORT,
        replica_id=model.replica_id,
        server_version=RELEASE,
        processor=_processor(engine.device),
        threads=engine.num_threads,
    )


def is_invariant(model: ServedModel[Engine], *, may_vary: bool) -> bool:
    """Return whether an answer has the same bits whatever it is batched with."""
    return BATCH_INVARIANT in model.capabilities and not may_vary


def origin(model: ServedModel[Engine], seed: int | None) -> str:
    """Return what answers must have in common to be the same, for the same request.

    The package, the server, where it runs, and the seed where something is drawn.
    """
    engine = model.engine
    what = (engine.package.manifest_sha256, engine.device, engine.num_threads)
    return _digest(*what) + ("" if seed is None else f"-{seed:x}")


@lru_cache(maxsize=64)
def _digest(manifest_sha256: bytes, device: str, num_threads: int) -> str:
    what = repr((manifest_sha256, RELEASE, _processor(device), num_threads))
    return hashlib.sha256(what.encode()).hexdigest()[:32]


@cache
def _processor(device: str) -> str:
    return processor_kind() if device == "cpu" else device


def usage(parts: Sequence[Usage]) -> common_pb2.Usage:
    """Return what all inputs of a call consumed together."""
    return common_pb2.Usage(
        input_tokens=sum(part.input_tokens for part in parts),
        cached_input_tokens=sum(part.cached_input_tokens for part in parts),
        output_tokens=sum(part.output_tokens for part in parts),
        discarded_tokens=sum(part.discarded_tokens for part in parts),
        reasoning_tokens=sum(part.reasoning_tokens for part in parts),
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


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def note(record: Record, event: GenerationEvent) -> None:
    """Note an end, of a sequence or of an input, in the record of a call."""
    match event:
        case SequenceFinished():
            record.finish_reasons.append(event.reason.value)
        case RequestFinished():
            noted = sum(part.num_sequences for part in record.parts)
            answered(record, event.usage, event.timing, len(record.finish_reasons) - noted)


def answered(record: Record, usage: Usage, timing: Timing, num_sequences: int = 1) -> None:
    """Note that an input is answered."""
    record.parts.add(
        input_tokens=usage.input_tokens,
        cached_input_tokens=usage.cached_input_tokens,
        output_tokens=usage.output_tokens,
        num_sequences=num_sequences,
        queue=timing.queue,
        prefill=timing.prefill,
        decode=timing.decode,
        time_to_first_token=timing.time_to_first_token,
    )
