"""The requests that a process works at, by their ids, so that an operator can end them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.errors import RequestAborted


class RunningRequests:
    """Knows which task answers a request; all of it on one event loop."""

    def __init__(self) -> None:
        self._running: dict[str, set[asyncio.Task[Any]]] = {}  # two clients may use the same id
        self._aborted: set[asyncio.Task[Any]] = set()

    @contextmanager
    def abortable(self, request_id: str) -> Iterator[None]:
        """Make the block abortable by `abort`: it then raises RequestAborted.

        A task without an id cannot be named.
        """
        if not request_id:
            yield
            return
        task = asyncio.current_task()
        assert task is not None, "it runs on an event loop"
        tasks = self._running.setdefault(request_id, set())
        tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._aborted and not task.uncancel():  # by nobody else
                raise RequestAborted("an operator has ended the request") from None
            raise
        finally:
            tasks.remove(task)
            self._aborted.discard(task)
            if not tasks:
                del self._running[request_id]

    def abort(self, request_ids: Iterable[str]) -> set[str]:
        """End all requests of these ids; return the ids of those that were there."""
        found = {request_id for request_id in request_ids if request_id in self._running}
        for request_id in found:
            for task in self._running[request_id] - self._aborted:
                self._aborted.add(task)
                task.cancel()
        return found
