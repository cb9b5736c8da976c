"""A worker as the gateway sees it: its channel, what it serves, how much is under way there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import cast

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenweir.keepalive import keepalive_options
from tokenweir.v1 import admin_service_pb2, admin_service_pb2_grpc

from engine.background import in_background
from server.gateway.traffic import ModelVersion
from server.gateway.worker_call import WorkerCall, WorkerFailed
from server.gateway.worker_calls import WorkerCalls
from server.gateway.worker_channel import WorkerChannel
from server.identity.peers import CHANNEL_OPTIONS, Peers

logger = logging.getLogger(__name__)

RECONNECT_PAUSE = 0.2  # seconds between two attempts to watch a worker that does not answer
_LIST_TIMEOUT = 5.0  # seconds
_SILENT = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE})

_CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),  # the gateway retries, at another worker
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new worker at an old address starts afresh
    ("grpc.max_receive_message_length", -1),  # answers: their size is the worker's business
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class WorkerLost(Exception):
    """The worker does not answer any more; its calls were ended on this side."""


class Backend:
    """One worker; one that does not answer a ping or a question for `silence` seconds is lost."""

    def __init__(
        self,
        address: str,
        changed: Callable[[], Awaitable[None]],
        *,
        silence: float,
        peers: Peers | None = None,
    ) -> None:
        """Call `changed` when it serves other models; with `peers` all is encrypted."""
        self.address = address
        self.outstanding = 0  # calls of this gateway under way there
        self.of_others = 0  # calls that others had there, when the worker last said how many it has
        self.serving = False  # as the worker itself reports
        self.models: frozenset[ModelVersion] = frozenset()  # that are ready there
        options = (*_CHANNEL_OPTIONS, *keepalive_options(silence, silence))
        if peers is None:
            self.calls = WorkerCalls(address, options)
        else:
            credentials = peers.of_channel()
            self.calls = WorkerCalls(address, (*options, *CHANNEL_OPTIONS), credentials)
        self.channel = cast(aio.Channel, WorkerChannel(self.calls))  # as far as stubs go
        self.admin = admin_service_pb2_grpc.AdminServiceStub(self.channel)
        self._silence = silence
        self._is_lost = False
        self._calls: set[WorkerCall] = set()
        self._changed = changed
        self._idle = asyncio.Event()
        self._idle.set()
        self._watching = in_background(f"watching worker {address}", self._watch)

    @property
    def load(self) -> int:
        """The calls under way there, as far as is known, those of other gateways too."""
        return self.outstanding + self.of_others

    def heard(self, load: int) -> None:
        """Note how many calls the worker itself says that it has."""
        self.of_others = max(0, load - self.outstanding)

    def has(self, call: WorkerCall) -> None:
        """Count a call that goes there, until `has_no_more`."""
        self.outstanding += 1
        self._calls.add(call)
        self._idle.clear()

    def has_no_more(self, call: WorkerCall) -> None:
        """Count a call no more that has come back."""
        self._calls.discard(call)
        self.outstanding -= 1
        if not self.outstanding:
            self._idle.set()

    def raise_if_lost(self) -> None:
        """Raise WorkerLost if the calls that go there were ended because it does not answer."""
        if self._is_lost and not _is_cancelled_itself():
            raise WorkerLost(f"worker {self.address} does not answer") from None

    async def retire(self) -> bool:
        """Stop watching; close the connection once the running calls have ended.

        A worker that stops ends its calls itself. One that does not even say that it is there has
        lost them: they end with WorkerLost here. Return whether it was there to the end.
        """
        try:
            await self._stop_watching()
            while answers := await self._answers():
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._silence):
                        await self._idle.wait()
                    break
            if not answers:
                self._give_up()
            return answers
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection at once; calls that run there end."""
        await self._stop_watching()
        self.calls.close()

    async def _answers(self) -> bool:
        """Return whether the worker's event loop says anything at all."""
        health = health_pb2_grpc.HealthStub(self.channel)
        try:
            await health.Check(health_pb2.HealthCheckRequest(), timeout=self._silence)
        except WorkerFailed as error:
            return error.code not in _SILENT
        return True

    def _give_up(self) -> None:
        self._is_lost = True
        for call in tuple(self._calls):
            call.cancel()

    async def _stop_watching(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Follow the worker's own health, which turns before it refuses and when it dies."""
        health = health_pb2_grpc.HealthStub(self.channel)
        while True:
            started = time.monotonic()
            try:
                async for response in health.Watch(health_pb2.HealthCheckRequest(service="")):
                    serving = response.status == health_pb2.HealthCheckResponse.SERVING
                    await self._set(await self._list_models() if serving else None)
            except WorkerFailed:
                pass
            await self._set(None)
            await asyncio.sleep(max(0.0, started + RECONNECT_PAUSE - time.monotonic()))

    async def _list_models(self) -> frozenset[ModelVersion]:
        response: admin_service_pb2.ListModelsResponse = await self.admin.ListModels(
            admin_service_pb2.ListModelsRequest(), timeout=_LIST_TIMEOUT
        )
        return frozenset(ModelVersion(one.model, one.model_version) for one in response.models)

    async def _set(self, models: frozenset[ModelVersion] | None) -> None:
        if (models is not None, models or frozenset()) != (self.serving, self.models):
            self.serving, self.models = models is not None, models or frozenset()
            names = ", ".join(map(str, sorted(self.models)))
            what = f"serves {names}" if self.serving else "does not serve"
            logger.info("worker %s %s", self.address, what)
            await self._changed()


def _is_cancelled_itself() -> bool:
    """Return whether the current task was cancelled, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
