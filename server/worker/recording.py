"""Keeps a record of every call that runs a model, and hands it on at the end of the call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from engine.errors import EngineFailure, TokenweirError
from server.api import TENANT_KEY, WAITED_KEY
from server.interceptors import (
    Behavior,
    Context,
    Handler,
    WrappingInterceptor,
    current_request_id,
    with_behavior,
)
from server.status import status_code
from server.telemetry.trace_context import traceparent_in
from server.worker.call_record import CallRecord, begin_record

logger = logging.getLogger(__name__)

Observer = Callable[[CallRecord], None]


class RecordingInterceptor(WrappingInterceptor):
    """Comes behind the StatusInterceptor, and sees every error before it becomes a status."""

    def __init__(self, services: frozenset[str], observers: Sequence[Observer]) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._observers = observers

    def wrap(self, method: str, handler: Handler) -> Handler:
        if not method.startswith(self._prefixes):
            return handler
        name = method.rpartition("/")[2]

        async def around(behavior: Behavior, request: Any, context: Context) -> Any:
            metadata = context.invocation_metadata()
            record = CallRecord(
                name,
                time.time(),
                traceparent_in(metadata),
                tenant=_tenant_in(metadata),
                waited=_waited_in(metadata),
            )
            begin_record(record)
            started = time.monotonic()
            try:
                return await behavior(request, context)
            except BaseException as error:
                _note_failure(record, error)
                raise
            finally:
                record.seconds = time.monotonic() - started
                record.request_id = current_request_id()
                self._tell(record)

        return with_behavior(handler, around)

    def _tell(self, record: CallRecord) -> None:
        for observe in self._observers:
            try:
                observe(record)
            except Exception:  # an observer must not end the call
                logger.exception("request %s was not recorded", record.request_id)


def _tenant_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return whose a call is, where a gateway knows and the message does not say it."""
    found = (value for key, value in metadata or () if key == TENANT_KEY)
    return next((one.decode(errors="replace") for one in found if isinstance(one, bytes)), "")


def _waited_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> float | None:
    """Return the seconds for which a gateway has had a call; None where it does not tell."""
    found = (str(value) for key, value in metadata or () if key == WAITED_KEY)
    return next((int(one) / 1e6 for one in found if one.isdecimal()), None)


def _note_failure(record: CallRecord, error: BaseException) -> None:
    """Note how a call fails."""
    match error:
        case TokenweirError():
            record.status, record.reason = status_code(type(error)).name, error.reason
            record.error = str(error)
        case asyncio.CancelledError():
            record.status = grpc.StatusCode.CANCELLED.name
        case Exception():
            record.status, record.reason = grpc.StatusCode.INTERNAL.name, EngineFailure.reason
            record.error = type(error).__name__
