"""A worker's connection to the command that serves it: it lives, and this is its log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from engine.background import in_background
from server.ray.last_words import own_stderr
from server.ray.registry import HEARTBEAT, WorkerInfo
from server.ray.roster import MAX_LINE, RosterAddress, connect
from server.telemetry.log_budget import LogBudget
from server.telemetry.logs import fields_of, traceback_of

_MAX_TEXT = MAX_LINE // 16  # characters, and as many of a traceback; of one JSON makes six bytes
_ANSWER_TIMEOUT = 2.0  # seconds
_MAX_WAITING = 1000  # records, while there is no connection


class RosterLink:
    """Tells a roster that a worker is alive, and what it logs; connects again where it must."""

    def __init__(
        self,
        roster: RosterAddress,
        clock: Callable[[], float] = time.monotonic,
        find: Callable[[], Awaitable[RosterAddress | None]] | None = None,
    ) -> None:
        """Ask `find` where the roster is by now, when it is not where it was."""
        self._roster = roster
        self._find = find
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.name = ""  # the worker's, once it is alive
        self._worker: WorkerInfo | None = None
        self._last_contact = clock()
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_MAX_WAITING)
        self._answers: asyncio.Queue[bool] = asyncio.Queue()
        self._news = asyncio.Event()
        self._running = in_background("telling the roster", self._run)

    @property
    def broken(self) -> bool:
        """True if nothing is told any more, which never ought to be."""
        return self._running.done()

    @property
    def silence(self) -> float:
        """The seconds since the roster was last connected."""
        return self._clock() - self._last_contact

    def alive(self, worker: WorkerInfo) -> None:
        """Tell from now on that the worker takes calls."""
        self.name = worker.address
        self._worker = worker
        self._news.set()

    async def leave(self, *, fails: bool = False) -> bool:
        """Tell that the worker takes no more calls; return whether all is over.

        A worker that fails leaves without having been told to.
        """
        self._worker = None
        self._put({"leaving": True, "fails": fails})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT):
                return await self._answers.get()
        return False

    def log(self, level: int, text: str, **more: Any) -> None:
        """Tell a record of the log; from any thread. `more` is its logger, fields, traceback."""
        message = {"level": level, "text": text[:_MAX_TEXT], **more}
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody hears any more
            self._loop.call_soon_threadsafe(self._put, message)

    async def close(self) -> None:
        """Tell what waits, if that is possible within a moment, and close the connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT):
                self._news.set()
                while self._waiting and not self.broken:
                    await asyncio.sleep(0.01)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def _put(self, message: dict[str, Any]) -> None:
        self._waiting.append(message)
        self._news.set()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self._tell()
            await asyncio.sleep(HEARTBEAT)

    async def _tell(self) -> None:
        reader, writer = await self._connect()
        listening = asyncio.create_task(self._listen(reader))
        try:
            _write(
                writer, {"token": self._roster.token, "pid": os.getpid(), "stderr": own_stderr()}
            )
            while not listening.done():
                self._last_contact = self._clock()
                if self._worker is not None:
                    _write(writer, {"alive": asdict(self._worker)})
                while self._waiting:
                    _write(writer, self._waiting.popleft())
                await writer.drain()
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    # Python 3.11's wait_for forgets a cancellation that comes with the news.
                    async with asyncio.timeout(HEARTBEAT):
                        await self._news.wait()
        finally:
            listening.cancel()
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await connect(self._roster)
        except OSError:
            if self._find is not None and (found := await self._find()) is not None:
                self._roster = found
            raise

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                self._answers.put_nowait(json.loads(line) is True)


class LinkHandler(logging.Handler):
    """Gives a link the log of this process; beyond a budget only how many records there were."""

    def __init__(self, link: RosterLink, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._link = link
        # Errors have a budget of their own: refusals by the thousand must not hide them.
        self._budgets = {is_error: LogBudget(clock) for is_error in (False, True)}

    def emit(self, record: logging.LogRecord) -> None:
        budget = self._budgets[record.levelno >= logging.ERROR]
        left_out = budget.left_out
        if not budget.take():
            return
        if left_out:
            self._link.log(record.levelno, f"({left_out:,} lines like the next are left out)")
        try:
            more = {"logger": record.name, "fields": {**fields_of(record)}}
            traceback = traceback_of(record)[:_MAX_TEXT]
            self._link.log(record.levelno, record.getMessage(), **more, traceback=traceback)
        except Exception:
            self.handleError(record)


def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
