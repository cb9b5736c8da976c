"""A worker's connection to the command that serves it: it lives, and this is its log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from engine.background import in_background
from server.ray.registry import HEARTBEAT, WorkerInfo
from server.ray.roster import MAX_LINE, RosterAddress

RECORDS_PER_SECOND = 10.0  # of a worker's log, on average, errors and the rest each
RECORDS_AT_ONCE = 100
_MAX_TEXT = MAX_LINE // 8  # characters; JSON may need six bytes for one
_ANSWER_TIMEOUT = 2.0  # seconds
_MAX_WAITING = 1000  # records, while there is no connection


class RosterLink:
    """Tells a roster that a worker is alive, and what it logs; connects again where it must."""

    def __init__(self, roster: RosterAddress, clock: Callable[[], float] = time.monotonic) -> None:
        self._roster = roster
        self._clock = clock
        self._loop = asyncio.get_running_loop()
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
        self._worker = worker
        self._news.set()

    async def leave(self) -> bool:
        """Tell that the worker takes no more calls; return whether all is over."""
        self._worker = None
        self._put({"leaving": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT):
                return await self._answers.get()
        return False

    def log(self, level: int, text: str) -> None:
        """Tell a record of the log; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody hears any more
            self._loop.call_soon_threadsafe(self._put, {"level": level, "text": text[:_MAX_TEXT]})

    async def close(self) -> None:
        """Tell what waits, if that is possible within a moment, and close the connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT):
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
        reader, writer = await asyncio.open_connection(self._roster.host, self._roster.port)
        listening = asyncio.create_task(self._listen(reader))
        try:
            _write(writer, {"token": self._roster.token, "pid": os.getpid()})
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
        self._budgets = {is_error: _Budget(clock) for is_error in (False, True)}

    def emit(self, record: logging.LogRecord) -> None:
        budget = self._budgets[record.levelno >= logging.ERROR]
        left_out = budget.left_out
        if not budget.take():
            return
        if left_out:
            self._link.log(record.levelno, f"({left_out:,} lines like the next are left out)")
        try:
            self._link.log(record.levelno, self.format(record))
        except Exception:
            self.handleError(record)


class _Budget:
    """So many records a second on average, and more at once after a pause."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.left_out = 0  # since the last that was taken
        self._clock = clock
        self._left = float(RECORDS_AT_ONCE)
        self._updated = clock()

    def take(self) -> bool:
        """Is there room for one more?"""
        now = self._clock()
        gained = (now - self._updated) * RECORDS_PER_SECOND
        self._left, self._updated = min(self._left + gained, RECORDS_AT_ONCE), now
        if self._left < 1:
            self.left_out += 1
            return False
        self._left -= 1
        self.left_out = 0
        return True


def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
