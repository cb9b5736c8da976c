"""The workers that a gateway knows: which of them a call is sent to, and when none is left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import grpc

from engine.background import in_background
from engine.errors import ReplicasLost, Starting, TokenweirError
from server.gateway.affinity import Affinity, least_loaded, prefix_of
from server.gateway.backend import Backend
from server.gateway.losses import Losses
from server.gateway.share import share_of
from server.identity.peers import Peers
from server.request_ids import request_id_in
from server.status import CallStatus, call_status

logger = logging.getLogger(__name__)

_PAUSE = 0.05  # seconds before workers that have all refused are asked again
_RETRY_AFTER = 0.5  # seconds
_MAX_LOSSES = 3  # workers that one call may lose: it might be what kills them


@dataclass
class Attempts:
    """What one call has met with so far."""

    method: str
    request: bytes
    wait: float  # seconds that it waits for a worker that takes it, anew for every one it loses
    memory: Losses  # of this call and of those that asked the same before
    refused: set[Backend] = field(default_factory=set)
    excluded: set[Backend] = field(default_factory=set)  # that give another answer
    last: CallStatus | None = None

    def __post_init__(self) -> None:
        self.give_up = time.monotonic() + self.wait
        self.losses = self.memory.of(self.request)

    @cached_property
    def model(self) -> str:
        """The model of the call; looked for only where workers have different ones."""
        return share_of(self.method, self.request).model

    @cached_property
    def prefix(self) -> bytes | None:
        """How its prompt begins; looked for only where a worker is chosen by it."""
        return prefix_of(self.method, self.request)

    @cached_property
    def request_id(self) -> str:
        """The client's id of the call; looked for only where the gateway has an error to tell."""
        return request_id_in(self.method, self.request)

    def failed(self, backend: Backend, status: CallStatus, *, lost: bool) -> None:
        """Remember that a worker did not take the call."""
        self.refused.add(backend)
        if lost:
            self.lost()
            self.give_up = time.monotonic() + self.wait
        self.last = status

    def go_on(self, backend: Backend, status: CallStatus, *, anew: bool) -> None:
        """Look for a worker that goes on with what this one had; this is the end if none comes.

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

    def lost(self) -> None:
        """Remember that the worker was lost that had the call."""
        self.losses += 1
        self.memory.note(self.request, self.losses)

    def refuse_poison(self) -> None:
        """Raise ReplicasLost when the call has lost too many workers to be given to another."""
        if self.losses >= _MAX_LOSSES:
            raise ReplicasLost(
                f"{self.losses} replicas were lost one after the other while they had this "
                "request; it goes to no other, for it may be what ends them"
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
        lost: Callable[[str], Awaitable[None]],
        *,
        silence: float,
        peers: Peers | None = None,
        affinity: Affinity | None = None,
    ) -> None:
        """Call `changed` when serving workers change, `lost` with one that hangs.

        `silence` and `peers` are those of Backend. With `affinity` a call goes to where its
        prompt's beginning may be kept.
        """
        self._changed = changed
        self._lost = lost
        self._silence = silence
        self._peers = peers
        self._affinity = affinity
        self._backends: dict[str, Backend] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._refusal: TokenweirError | None = None  # of every call, once the gateway closes
        self._news = asyncio.Condition()  # notified when there may be a worker to ask

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The workers that are known now, serving or not."""
        return tuple(self._backends.values())

    @property
    def serving(self) -> list[Backend]:
        """The workers that take calls now."""
        return [backend for backend in self._backends.values() if backend.serving]

    async def sync(self, addresses: Sequence[str]) -> None:
        """Know these workers only; others finish their running calls if they can."""
        for address in set(self._backends) - set(addresses):
            retire = partial(self._retire, self._backends.pop(address))
            task = in_background(f"leaving worker {address}", retire, restart_pause=None)
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        for address in dict.fromkeys(addresses):
            if address not in self._backends:
                self._backends[address] = Backend(
                    address, self._tell, silence=self._silence, peers=self._peers
                )
        await self._tell()

    def trust(self, peers: Peers | None) -> None:
        """Use this certificate for workers that are new from now on."""
        self._peers = peers

    def hear(self, loads: Mapping[str, int]) -> None:
        """Take how many calls workers say that they have, by address."""
        for backend in self._backends.values():
            if (load := loads.get(backend.address)) is not None:
                backend.heard(load)

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
        await self._tell()

    async def choose(self, attempts: Attempts) -> Backend:
        """Return a worker with little under way, waiting until there is one to ask.

        It is one that has the model, if there is one.

        Raises CallFailed when all are full or none comes in time, ReplicasLost when the call has
        lost too many, and what `refuse_waiting` was given.
        """
        while True:
            if self._refusal is not None:
                raise self._refusal
            serving = _having_model(self.serving, attempts)
            out = attempts.refused | attempts.excluded
            fresh = [backend for backend in serving if backend not in out]
            attempts.refuse_poison()
            if serving and not fresh and _is_full(attempts):
                raise CallFailed(_last_status(attempts))
            if fresh:
                if self._affinity is not None and len(serving) > 1:
                    return self._affinity.choose(attempts.prefix, fresh)
                return least_loaded(fresh)
            await self._wait(attempts, pause=bool(serving))

    async def _retire(self, backend: Backend) -> None:
        if not await backend.retire():
            logger.warning("worker %s does not answer; its calls go elsewhere", backend.address)
            await self._lost(backend.address)

    async def _wait(self, attempts: Attempts, *, pause: bool) -> None:
        seconds = attempts.give_up - time.monotonic()
        if seconds <= 0:
            raise CallFailed(_last_status(attempts))
        try:
            async with asyncio.timeout(min(seconds, _PAUSE) if pause else seconds):
                async with self._news:
                    await self._news.wait()
        except TimeoutError:
            attempts.refused.clear()

    async def _tell(self) -> None:
        self._changed()
        async with self._news:
            self._news.notify_all()


def _having_model(serving: list[Backend], attempts: Attempts) -> list[Backend]:
    """Return the workers that have the model of a call; all, if none says so."""
    if len({backend.models for backend in serving}) < 2:
        return serving
    return [backend for backend in serving if attempts.model in backend.models] or serving


def _is_full(attempts: Attempts) -> bool:
    return attempts.last is not None and attempts.last.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def _last_status(attempts: Attempts) -> CallStatus:
    if attempts.last is not None:
        return attempts.last
    error = Starting("no worker is there to take the call; try again later", _RETRY_AFTER)
    return call_status(error, attempts.request_id)
