"""The lifecycle of an engine that runs in a thread of this process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from engine.lifecycle.lifecycle import FailOpen, Lifecycle, WarmUpResult, failure

_log = logging.getLogger(__name__)


class ThreadLifecycle(Lifecycle):
    """A Lifecycle of a thread.

    The thread itself tries the model out: what a device captures there, it repeats only there.
    """

    def __init__(
        self,
        name: str,
        thread_name: str,
        warm_up: Callable[[], WarmUpResult],
        max_step_seconds: float,
        *,
        niceness: int,
    ) -> None:
        """`name` is the model's; `warm_up` runs it before the first request.

        The thread gives way to the others of this process by `niceness` when processors are short.
        """
        super().__init__(name, thread_name, max_step_seconds)
        self._warm_up = warm_up
        self._niceness = niceness
        self._has_warmed_up = threading.Event()
        self._shown: WarmUpResult | Exception = WarmUpResult()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def start(self, serve: Callable[[], None], fail_open: FailOpen) -> None:
        """Try the model out, then call `serve` in the same thread; PackageError if it fails.

        If the thread dies or a step takes too long, `fail_open` is called on this event loop.
        """
        self._serve = serve
        await self._begin(fail_open)

    def step(self) -> AbstractContextManager[None]:
        """Return what the engine's thread is inside of for a step; one that raises has failed."""
        return self._step_watch

    def call_on_loop(self, function: Callable[..., None], *args: object) -> bool:
        """Let the event loop call a function; False if it is closed, and with it every request."""
        assert self._loop is not None, "who calls runs in the engine's thread"
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            _log.warning("the event loop is closed; the engine of %s stops", self.name)
            return False
        return True

    async def _try_out(self) -> WarmUpResult:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=self._what, daemon=True)
        self._thread.start()
        await asyncio.to_thread(self._has_warmed_up.wait)
        if isinstance(self._shown, Exception):
            raise self._shown
        return self._shown

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    async def _join(self) -> None:
        await self._step_watch.join(lambda: not self._is_running())

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere it is the niceness of the whole process
            os.nice(self._niceness)
        try:
            self._shown = self._warm_up()
        except Exception as error:
            self._shown = error
            return
        finally:
            self._has_warmed_up.set()
        try:
            self._serve()
        except Exception:
            _log.exception("the engine of %s has stopped", self.name)
            self.call_on_loop(self._fail, failure)
