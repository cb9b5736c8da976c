"""The requests that a process works at, by their ids, so that an operator can end them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine.errors import RequestAborted


class RunningRequests:
    """Knows which task answers a request; all of it on one event loop."""

    def __init__(self) -> None:
        self._running: dict[str, list[Abortable]] = {}  # two clients may use the same id

    def abortable(self, request_id: str) -> Abortable:
        """Make the block abortable by `abort`: it then raises RequestAborted.

        A task without an id cannot be named.
        """
        return Abortable(self._running, request_id)

    def abort(self, request_ids: Iterable[str]) -> set[str]:
        """End all requests of these ids; return the ids of those that were there."""
        found = {request_id for request_id in request_ids if request_id in self._running}
        for request_id in found:
            for running in self._running[request_id]:
                running.abort()
        return found


class Abortable:
    """A block in which a task answers a request."""

    __slots__ = ("_is_aborted", "_request_id", "_running", "_task")

    def __init__(self, running: dict[str, list[Abortable]], request_id: str) -> None:
        self._running = running
        self._request_id = request_id
        self._is_aborted = False

    def __enter__(self) -> None:
        if not self._request_id:
            return
        task = asyncio.current_task()
        assert task is not None, "it runs on an event loop"
        self._task = task
        self._running.setdefault(self._request_id, []).append(self)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._request_id:
            return
        others = self._running[self._request_id]
        others.remove(self)
        if not others:
            del self._running[self._request_id]
        is_cancelled = self._is_aborted and isinstance(error, asyncio.CancelledError)
        if is_cancelled and not self._task.uncancel():  # by nobody else
            raise RequestAborted("an operator has ended the request") from None

    def abort(self) -> None:
        """End it; nothing the second time."""
        if not self._is_aborted:
            self._is_aborted = True
            self._task.cancel()
