"""The workers that a gateway knows: which of them a call is sent to, and when none is left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import grpc
from tokenweir.v1.admin_service_pb2 import ModelInfo

from engine.background import in_background
from engine.errors import ReplicasLost, Starting, TokenweirError
from server.auth.internal_certificate import InternalCertificate
from server.calls.status import CallStatus, call_status
from server.gateway.affinity import Affinity, least_loaded, prefix_of
from server.gateway.backend import Backend, WorkerLink
from server.gateway.losses import Loss, Losses
from server.gateway.request_head import RequestHead, request_id_of
from server.gateway.resume.resumable import STREAM, asked_at_first
from server.gateway.traffic import ModelVersion, Traffic

logger = logging.getLogger(__name__)

_PAUSE = 0.05  # seconds before workers that have all refused are asked again
_RETRY_AFTER = 0.5  # seconds
_FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
_MAX_LOSSES = 3  # workers that one call may crash: it might be what ends them
Lost = Callable[[str], Awaitable[None]]  # by the address of a worker


@dataclass
class Attempts:
    """The attempts of one call so far."""

    method: str
    request: bytes
    wait: float  # seconds that it waits for a worker that takes it, anew for every one it loses
    memory: Losses  # this call and those that asked the same before
    head: RequestHead  # the model that it is for
    refused: set[Backend] = field(default_factory=set)
    excluded: set[Backend] = field(default_factory=set)  # workers that give another answer
    last: CallStatus | None = None

    def __post_init__(self) -> None:
        self.request_id = request_id_of(self.head)  # in errors of gateway and worker
        self.give_up = time.monotonic() + self.wait
        self.losses = self.memory.of(self._asked) if self.memory.has_any else set()
        self.ahead = Loss()  # met if the worker that has the call is lost

    @cached_property
    def prefix(self) -> bytes | None:
        """How its prompt begins; looked for only where a worker is chosen by it."""
        return prefix_of(self.method, self.request)

    @cached_property
    def key(self) -> bytes:
        """Bytes that are the same when the call is made again."""
        return self.head.request_id.encode() or self.request

    @cached_property
    def _asked(self) -> bytes:
        """Bytes that are the same whenever the call is made, also if it goes on with a stream."""
        return asked_at_first(self.request) if self.method == STREAM else self.request

    def go_on(self, backend: Backend, status: CallStatus, *, anew: bool) -> None:
        """Look for another worker than this one; its status is the end if none comes.

        With `anew` for as long as a call waits at first.
        """
        self.refused.add(backend)
        if anew:
            self.give_up = time.monotonic() + self.wait
        self.last = status

    def exclude(self, backend: Backend, status: CallStatus) -> None:
        """Never ask a worker again; this is the end if no other comes."""
        self.excluded.add(backend)
        self.last = status

    def begin(self, backend: Backend) -> None:
        """Note that a worker has the call from now on."""
        self.ahead = self.memory.ahead(backend.address)

    def lost(self, backend: Backend, crashed: bool | None) -> None:
        """Remember that the worker was lost that had the call; None: see `Loss`."""
        num_calls = backend.load + 1  # this one has come back
        self.memory.note(self._asked, self.ahead, backend.address, num_calls)
        if crashed is not None:
            self.ahead.crashed = crashed
        self.losses.add(self.ahead)

    def refuse_poison(self) -> None:
        """Raise ReplicasLost when the call has crashed too many workers to be given to another."""
        count = sum(loss.counts for loss in self.losses)
        if count >= _MAX_LOSSES:
            raise ReplicasLost(
                f"{count} replicas crashed one after the other while they had this request; it "
                "goes to no other, for it may be what ends them"
            )


class CallFailed(Exception):
    """No worker takes the call, or it failed at one; says how it ends for the client."""

    def __init__(self, status: CallStatus) -> None:
        self.status = status
        super().__init__(status.message)


class Pool:
    """Workers by address."""

    def __init__(
        self,
        changed: Callable[[], None],
        lost: Lost,
        link: WorkerLink,
        traffic: Traffic | None = None,
        affinity: Affinity | None = None,
    ) -> None:
        """Call `changed` when serving workers change, `lost` with one that hangs.

        `traffic` says which versions get which calls. With `affinity` a call goes to where its
        prompt's beginning may be kept.
        """
        self._traffic = traffic or Traffic()
        self._changed = changed
        self._lost = lost
        self._link = link
        self._affinity = affinity
        self._backends: dict[str, Backend] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._refusal: TokenweirError | None = None  # answers every call, once the gateway closes
        self._news = asyncio.Condition()  # notified when there may be a worker to ask

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The workers that are known now, serving or not; any thread may ask."""
        return tuple(self._backends.values())

    def addresses(self) -> Collection[str]:
        """Return the addresses of the workers that are known now."""
        return self._backends.keys()

    @property
    def serving(self) -> list[Backend]:
        """The workers that take calls now."""
        return [backend for backend in self.backends if backend.serving]

    @property
    def num_serving(self) -> int:
        """The number of workers that take calls now."""
        return len(self.serving)

    def models(self) -> list[ModelInfo]:
        """Return every version that some worker serves, by name; a copy, to be added to."""
        found = {ModelVersion.of(info): info for worker in self.serving for info in worker.infos}
        return [deepcopy(found[one]) for one in sorted(found)]

    async def sync(self, addresses: Sequence[str]) -> None:
        """Send new calls to these workers only, "host:port" each.

        Running calls go on at the others, unless one does not answer: then they end, or go to
        another worker if that did not show yet.
        """
        for address in set(self._backends) - set(addresses):
            retire = partial(self._retire, self._backends.pop(address))
            task = in_background(f"leaving worker {address}", retire, restart_pause=None)
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        for address in dict.fromkeys(addresses):
            if address not in self._backends:
                self._backends[address] = Backend(address, self.notify, self._link)
        await self.notify()

    def trust(self, certificate: InternalCertificate | None) -> None:
        """Use this certificate for workers that are new from now on."""
        self._link = replace(self._link, certificate=certificate)

    def is_responsive(self, address: str, within: float) -> bool:
        """Return whether a worker has sent its state within so many seconds, and may go on."""
        backend = self._backends.get(address)
        return backend is not None and time.monotonic() - backend.last_heard <= within

    def traffic_state(self) -> Mapping[str, Any]:
        """Which versions get which calls, for other gateways; see `apply_traffic`."""
        return self._traffic.state()

    async def apply_traffic(self, traffic: Mapping[str, Any]) -> None:
        """Send versions the calls that another gateway has told, where models are loaded."""
        if traffic != self._traffic.state():
            self._traffic.apply(traffic)
            await self.notify()

    async def refuse_waiting(self, error: TokenweirError) -> None:
        """End every call that waits for a worker, or will."""
        self._refusal = error
        async with self._news:
            self._news.notify_all()

    async def close(self) -> None:
        """Close all connections at once."""
        retiring = tuple(self._retiring)
        for task in retiring:
            task.cancel()
        backends = tuple(self._backends.values())
        self._backends.clear()
        await asyncio.gather(*retiring, *(b.close() for b in backends), return_exceptions=True)
        await self.notify()

    async def choose(self, attempts: Attempts) -> Backend:
        """Return a worker of its version with little under way; wait until there is one.

        Raises CallFailed when all are full or none comes in time, ReplicasLost when the call has
        crashed too many, NotFound for a model or version that no worker has, and what
        `refuse_waiting` was given.
        """
        while True:
            if self._refusal is not None:
                raise self._refusal
            serving = self._able(attempts)
            fresh = _without(attempts.refused, serving)
            attempts.refuse_poison()
            last = attempts.last
            if serving and not fresh and last is not None and last.code is _FULL:
                raise CallFailed(last)
            if fresh:
                if self._affinity is not None and len(serving) > 1:
                    return self._affinity.choose(attempts.prefix, fresh)
                return least_loaded(fresh)
            await self._wait(attempts, pause=bool(serving))

    @property
    def is_uniform(self) -> bool:
        """Whether every worker has all that any has: then each can say what there is."""
        return len({backend.models for backend in self.serving}) < 2

    def serving_version(self, one: ModelVersion) -> list[Backend]:
        """Return the workers that take calls for a version now."""
        workers = self._backends.values()
        return [backend for backend in workers if backend.serving and one in backend.models]

    async def wait_for(self, addresses: Sequence[str]) -> None:
        """Return when all these workers, which `sync` was or will be told of, take calls."""
        async with self._news:
            await self._news.wait_for(
                lambda: {*addresses} <= {backend.address for backend in self.serving}
            )

    def _able(self, attempts: Attempts) -> list[Backend]:
        """Return the serving workers of the version that a call falls to.

        If none of that version is left, those of another version that may answer; all of them if
        any one can say that the model or version is not there. Else raises NotFound.
        """
        named = ModelVersion(attempts.head.model, attempts.head.model_version)
        if not named.model:
            return _without(attempts.excluded, self.serving)
        candidates = self._traffic.candidates(*named, attempts.key)
        for version in candidates:
            if able := _without(attempts.excluded, self.serving_version(version)):
                return able
        if candidates:
            return []
        if self.is_uniform and not self._traffic.is_closed(named):
            return _without(attempts.excluded, self.serving)
        self._traffic.refuse(named)

    async def _retire(self, backend: Backend) -> None:
        if not await backend.retire():
            logger.warning("worker %s does not answer; its calls go elsewhere", backend.address)
            await self._lost(backend.address)

    async def _wait(self, attempts: Attempts, *, pause: bool) -> None:
        seconds = attempts.give_up - time.monotonic()
        if seconds <= 0:
            what = "no worker is there to take the call; try again later"
            starting = call_status(Starting(what, _RETRY_AFTER), attempts.request_id)
            raise CallFailed(attempts.last or starting)
        try:
            async with asyncio.timeout(min(seconds, _PAUSE) if pause else seconds):
                async with self._news:
                    await self._news.wait()
        except TimeoutError:
            attempts.refused.clear()

    async def notify(self) -> None:
        """Wake calls that wait for a worker: workers, or their traffic, have changed."""
        self._changed()
        async with self._news:
            self._news.notify_all()


async def do_nothing(address: str) -> None:
    """Leave a worker that hangs to itself."""


def _without(excluded: set[Backend], workers: list[Backend]) -> list[Backend]:
    return [worker for worker in workers if worker not in excluded] if excluded else workers
