"""A worker as the gateway sees it: its connection, what it serves, how much is under way there."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from tokenweir.keepalive import keepalive_options
from tokenweir.v1 import admin_service_pb2

from engine.background import in_background
from server.api import HEALTH
from server.auth.internal_certificate import CHANNEL_OPTIONS, InternalCertificate
from server.calls.status import CallStatus
from server.gateway.traffic import ModelVersion
from server.telemetry.metrics import Snapshot, known_samples
from server.wire.carrier import Carrier, Connection
from server.wire.work_pb2 import State
from server.wire.worker_call import WorkerCall, WorkerFailed
from server.wire.worker_log import log_of_worker

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=Message)

RECONNECT_PAUSE = 0.2  # seconds between two attempts to connect to a worker that does not answer
_REFUSED_PAUSE = 5.0  # seconds, likewise, of one that does not work together with this gateway
_STATE_PERIOD = 1.0  # seconds between two that a worker tells, at most
_SILENT = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE})
_CHECK = f"/{HEALTH}/Check"
# How a wire ends that a worker takes: it has gone, or this side has.
_ENDS = frozenset({grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE})

CONNECTION_OPTIONS = (
    ("grpc.enable_retries", 0),  # the gateway retries, at another worker
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new worker at an old address starts afresh
    ("grpc.max_receive_message_length", -1),  # answers: their size is the worker's business
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


@dataclass(frozen=True)
class WorkerLink:
    """How a worker is connected."""

    silence: float  # seconds without an answer to a ping or a question, and it is lost
    certificate: InternalCertificate | None = None  # encrypts all
    logs: bool = False  # its log records are logged here
    only_watches: bool = False  # no calls are sent there


class Backend:
    """One worker.

    It tells its state on the wire: when that turns, before it refuses, and every now and then.
    """

    def __init__(
        self, address: str, changed: Callable[[], Awaitable[None]], link: WorkerLink
    ) -> None:
        """Call `changed` when it serves other models or others send it more or fewer calls."""
        self.address = address
        self.outstanding = 0  # calls of this gateway under way there
        self.of_others = 0  # calls that others had there, when the worker last said how many it has
        self.num_gateways = 1  # connected ones, as the worker says
        self.serving = False  # as the worker itself reports
        self.infos: Sequence[admin_service_pb2.ModelInfo] = ()  # models that are ready there
        self.models: frozenset[ModelVersion] = frozenset()  # likewise
        self._silence = link.silence
        self.last_heard = -math.inf  # when it has last told its state, if it may go on
        self._state = State(serving=True)  # as it was last told
        self.is_lost = False  # its calls were ended because it does not answer
        self._is_retiring = False
        self._calls: set[WorkerCall] = set()
        self._changed = changed
        self._idle = asyncio.Event()
        self._idle.set()
        log = partial(log_of_worker, worker=address) if link.logs else None
        keepalive = keepalive_options(link.silence, link.silence)
        options: list[tuple[str, int | str]] = [*CONNECTION_OPTIONS, *keepalive]
        credentials = None
        if link.certificate is not None:
            options += CHANNEL_OPTIONS
            credentials = link.certificate.channel_credentials()
        self._connection = Connection(
            address, options, credentials, log, only_watches=link.only_watches
        )
        self._watching = in_background(f"watching worker {address}", self._watch)

    @property
    def load(self) -> int:
        """The calls under way there, as far as is known, those of other gateways too."""
        return self.outstanding + self.of_others

    @property
    def carrier(self) -> Carrier:
        """The wire by which calls go there now."""
        return self._connection.carrier

    @property
    def samples(self) -> Snapshot:
        """The samples of its engines."""
        return known_samples(
            (one.name, tuple(one.labels), [*one.values] if len(one.values) > 1 else one.values[0])
            for one in self._state.samples
            if one.values
        )

    async def ask(
        self,
        method: str,
        request: Message,
        answer: type[Answer],
        timeout: float | None = None,  # noqa: ASYNC109  # one without is no error
    ) -> Answer:
        """Ask something of the gateway itself; raises WorkerFailed, also for want of an answer."""
        data = request.SerializeToString()
        call = self.carrier.start(method, data, (), timeout, None)
        try:
            async with asyncio.timeout(timeout):
                await call.end()
        except TimeoutError:
            what = f"it did not answer within {timeout:g} s"
            status = CallStatus(grpc.StatusCode.DEADLINE_EXCEEDED, what, ())
            raise WorkerFailed(status) from None
        finally:
            call.cancel()  # does nothing once the call has ended
        assert call.response is not None, "without one its status is not OK"
        return answer.FromString(call.response)

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
        """Raise WorkerFailed if the calls that go there were ended because it does not answer."""
        task = asyncio.current_task()
        is_cancelled_itself = task is not None and task.cancelling() > 0  # not what it waits for
        if self.is_lost and not is_cancelled_itself:
            what = f"worker {self.address} does not answer"
            status = CallStatus(grpc.StatusCode.UNAVAILABLE, what, ())
            raise WorkerFailed(status, hangs=True) from None

    async def retire(self) -> bool:
        """Send nothing new; close the connection once the running calls have ended.

        A worker that stops ends its calls itself. One that does not even say that it is there has
        lost them: they end with WorkerFailed here. Return whether it was there to the end.
        """
        self._is_retiring = True
        try:
            while answers := await self._answers():
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._silence):
                        await self._idle.wait()
                    break
            if not answers:
                self.is_lost = True
                for call in tuple(self._calls):
                    call.cancel()
            return answers
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection at once; calls that run there end."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self._connection.close()

    async def _answers(self) -> bool:
        """Return whether the worker's event loop answers anything at all.

        A state may have been on the way when it began to hang.
        """
        if self.carrier.has_ended and not self._state.serving:
            return True  # it has left, as it said
        check, answer = health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse
        try:
            await self.ask(_CHECK, check, answer, self._silence)
        except WorkerFailed as error:
            return error.status.code not in _SILENT or error.is_workers_own
        return True

    async def _watch(self) -> None:
        """Carry calls, and follow the worker's own state, which turns before it refuses."""
        told = ""
        while not self._is_retiring:
            started = time.monotonic()
            carrier = self._connection.carry(_STATE_PERIOD)
            async for state in carrier.states():
                await self._take(state)
            end = carrier.end
            self.last_heard = -math.inf
            await self._set(None)
            refusal = carrier.mismatch or ("" if end.code in _ENDS else end.message)
            if refusal and refusal != told:
                logger.error("no calls go to worker %s: %s", self.address, refusal)
            told = refusal
            pause = _REFUSED_PAUSE if refusal else RECONNECT_PAUSE
            await asyncio.sleep(max(0.0, started + pause - time.monotonic()))

    async def _take(self, state: State) -> None:
        self.last_heard, self._state = time.monotonic(), state
        others = max(0, state.num_calls - self.outstanding) if state.num_gateways > 1 else 0
        if (others, state.num_gateways) != (self.of_others, self.num_gateways):
            self.of_others, self.num_gateways = others, state.num_gateways
            await self._changed()
        if state.HasField("models"):
            self._told = [*map(admin_service_pb2.ModelInfo.FromString, state.models.infos)]
        await self._set(self._told if state.serving else None)

    async def _set(self, infos: Sequence[admin_service_pb2.ModelInfo] | None) -> None:
        """Take in what it serves; None: it takes no calls."""
        if self._is_retiring:
            return
        self.infos = infos or ()
        models = frozenset(map(ModelVersion.of, self.infos))
        if (infos is not None, models) != (self.serving, self.models):
            self.serving, self.models = infos is not None, models
            names = ", ".join(map(str, sorted(self.models)))
            what = f"serves {names}" if self.serving else "does not serve"
            logger.info("worker %s %s", self.address, what)
            await self._changed()
