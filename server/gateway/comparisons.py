"""Asks two versions of a model the same, and counts whether they answer the same."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tokenweir.v1 import admin_service_pb2
from tokenweir.v1 import generation_service_pb2 as pb
from tokenweir.v1.prediction_service_pb2 import ClassifyRequest

from engine.background import in_background
from server.api import GENERATION, METHODS
from server.gateway.affinity import least_loaded
from server.gateway.answer_comparison import COMPARABLE, compare
from server.gateway.backend import Backend
from server.gateway.pool import Pool
from server.gateway.resumable import STREAM
from server.gateway.share import Share
from server.gateway.traffic import ALL, ModelVersion, Traffic
from server.gateway.worker_call import WorkerFailed
from server.telemetry.metrics import Counts

_TIMEOUT = 30.0  # seconds of both answers
_LATE = 1_000_000  # priority: behind everything that somebody waits for
_GENERATE = f"/{GENERATION}/Generate"
Comparison = admin_service_pb2.Comparison


class Comparisons:
    """Compares for a sample of answered requests, one at a time, where both versions have room.

    Nobody waits for it: both versions are asked anew, behind the answer, and in the last turn where
    there are turns.
    """

    def __init__(
        self,
        pool: Pool,
        traffic: Traffic,
        share: float,
        has_room: Callable[[Backend], bool],
        counts: Counts,
    ) -> None:
        """Compare `share` percent of the requests; `has_room` says it of a worker."""
        self._pool = pool
        self._traffic = traffic
        self._share = share
        self._has_room = has_room
        self._counts = counts
        self._running: asyncio.Task[None] | None = None
        self._tallies: dict[frozenset[ModelVersion], Comparison] = {}

    def consider(self, method: str, request: bytes, share: Share) -> None:
        """Compare a request that has been answered, if it is of the sample and there is room."""
        versions = self._traffic.versions(share.model)
        is_known = method == STREAM or method in COMPARABLE
        if len(versions) < 2 or not is_known or share.model_version:
            return
        key = share.request_id.encode() or request
        if self._running is not None or not _is_chosen(key, self._share):
            return
        first, second = self._traffic.candidates(share.model, "", key)[:2]
        workers = [self._free_worker(one) for one in (first, second)]
        if all(workers):
            pair = [worker for worker in workers if worker is not None]
            self._running = in_background(
                "comparing two versions",
                lambda: self._compare(method, request, (first, second), pair),
                restart_pause=None,
            )
            self._running.add_done_callback(self._has_ended)

    def of(self, one: ModelVersion) -> list[Comparison]:
        """Return what was found of a version beside others."""
        found = []
        for pair, tally in self._tallies.items():
            if one in pair:
                (other,) = pair - {one}
                copy = Comparison(model_version=other.version)
                copy.MergeFrom(tally)
                found.append(copy)
        return found

    def forget(self, one: ModelVersion) -> None:
        """Know nothing of a version any more."""
        for pair in [pair for pair in self._tallies if one in pair]:
            del self._tallies[pair]

    def close(self) -> None:
        """End what runs."""
        if self._running is not None:
            self._running.cancel()

    def _has_ended(self, _: object) -> None:
        self._running = None

    def _free_worker(self, one: ModelVersion) -> Backend | None:
        workers = [w for w in self._pool.serving_version(one) if self._has_room(w)]
        return least_loaded(workers) if workers else None

    async def _compare(
        self,
        method: str,
        data: bytes,
        versions: tuple[ModelVersion, ModelVersion],
        workers: Sequence[Backend],
    ) -> None:
        request = _request_in(method, data)
        if request is None or not _is_repeatable(request):
            return
        asked = _GENERATE if method == STREAM else method
        pairs = zip(workers, versions, strict=True)
        one, other = await asyncio.gather(
            *(_ask(worker, asked, request, version.version) for worker, version in pairs)
        )
        if not all(map(self._traffic.is_open, versions)):
            return  # one has gone meanwhile, and with it what was found
        if one is None or other is None:
            self._count(versions, "failed")
            return
        if _has_drawn(request, (one, other)):
            return
        found = compare(asked, one, other)
        tally = self._count(versions, "equal" if found.first_difference is None else "different")
        tally.largest_distance = max(tally.largest_distance, found.distance)
        if found.first_difference is not None and not tally.HasField("first_difference"):
            found.first_difference.request_id = request.request_id
            tally.first_difference.CopyFrom(found.first_difference)

    def _count(self, versions: tuple[ModelVersion, ModelVersion], result: str) -> Comparison:
        tally = self._tallies.setdefault(frozenset(versions), Comparison())
        setattr(tally, result, getattr(tally, result) + 1)
        self._counts.count("gateway_compared_answers", versions[0].model, result)
        return tally


def _is_chosen(key: bytes, share: float) -> bool:
    """Say whether a request is of the sample: others than those that a version's share takes."""
    digest = hashlib.blake2b(key, digest_size=8, person=b"comparison").digest()
    return int.from_bytes(digest) / 2**64 * ALL < share


def _request_in(method: str, data: bytes) -> Any:
    """Return the message of a request; None if it is none."""
    try:
        if method == STREAM:
            return pb.GenerateStreamRequest.FromString(data).request
        return _message_class(METHODS[method].input_type).FromString(data)
    except DecodeError:
        return None


def _is_repeatable(request: Any) -> bool:
    """Say whether the same is to be answered again: where it draws, it says the seed."""
    if not isinstance(request, pb.GenerateRequest):
        return True
    decoding = request.decoding
    return decoding.WhichOneof("strategy") != "sampling" or decoding.sampling.HasField("seed")


def _has_drawn(request: Any, answers: Sequence[Any]) -> bool:
    """Say whether a package draws by itself, where nobody has said how it decodes."""
    if not isinstance(request, pb.GenerateRequest) or request.decoding.WhichOneof("strategy"):
        return False
    return any(answer.provenance.seed for answer in answers)


async def _ask(worker: Backend, method: str, request: Any, version: str) -> Any | None:
    """Return what a version answers that is compared, and nothing else; None if it fails."""
    asked = type(request)()
    asked.CopyFrom(request)
    asked.request_id, asked.model_version = str(uuid.uuid4()), version
    if isinstance(asked, pb.GenerateRequest | pb.ScoreRequest):
        asked.scheduling.priority = _LATE
    if isinstance(asked, pb.GenerateRequest):
        asked.output.CopyFrom(pb.Output(token_ids=True))
    if isinstance(asked, pb.ScoreRequest):
        asked.ClearField("top_logprobs")
    if isinstance(asked, ClassifyRequest):
        asked.top = 0  # all labels
    call = worker.channel.unary_unary(
        method,
        request_serializer=type(asked).SerializeToString,
        response_deserializer=_message_class(METHODS[method].output_type).FromString,
    )
    try:
        return await call(asked, timeout=_TIMEOUT)
    except WorkerFailed:
        return None


def _message_class(descriptor: Descriptor) -> Any:
    return GetMessageClass(descriptor)
