"""The requests that a process works at, by their ids, so that an operator can end them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from engine.errors import RequestAborted


class RunningRequests:
    """Knows which task answers a request; all of it on one event loop."""

    def __init__(self) -> None:
        self._running: dict[str, list[_Running]] = {}  # two clients may use the same id

    @contextmanager
    def abortable(self, request_id: str) -> Iterator[None]:
        """Let `abort` end what the task does in the block, which then raises RequestAborted.

        Without an id nobody can name it.
        """
        if not request_id:
            yield
            return
        task = asyncio.current_task()
        assert task is not None, "it runs on an event loop"
        running = _Running(task)
        self._running.setdefault(request_id, []).append(running)
        try:
            yield
        except asyncio.CancelledError:
            if not running.is_aborted or task.uncancel():  # by somebody else, too
                raise
            raise RequestAborted("an operator has ended the request") from None
        finally:
            others = self._running[request_id]
            others.remove(running)
            if not others:
                del self._running[request_id]

    def abort(self, request_ids: Iterable[str]) -> set[str]:
        """End all requests of these ids; return the ids of those that were there."""
        found = {request_id for request_id in request_ids if request_id in self._running}
        for request_id in found:
            for running in self._running[request_id]:
                running.abort()
        return found


class _Running:
    """A task that answers a request."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.is_aborted = False
        self._task = task

    def abort(self) -> None:
        """End it; nothing the second time."""
        if not self.is_aborted:
            self.is_aborted = True
            self._task.cancel()
