"""The log of a worker, on its way to the gateway that writes it with its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

from server.settings import Log
from server.telemetry.logs import LogBudget, fields_of, formatter_of, traceback_of, with_fields
from server.wire.work_pb2 import LogRecord

_MAX_TEXT = 1 << 16  # characters, and as many of a traceback
_MAX_KEPT = 1000  # records, until somebody wants them
Give = Callable[[LogRecord], None]


class WorkerLog(logging.Handler):
    """Gives the log of this process to gateways that want it; beyond a budget only its length.

    Lines that nobody wants go to the standard error, and to the first one that does.
    """

    def __init__(self, config: Log, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._stderr = logging.StreamHandler(sys.stderr)
        self._stderr.setFormatter(formatter_of(config))
        self._loop = asyncio.get_running_loop()
        self._wanting: list[Give] = []
        self._kept: deque[LogRecord] = deque(maxlen=_MAX_KEPT)
        # Errors have a budget of their own: refusals by the thousand must not hide them.
        self._budgets = {is_error: LogBudget(clock) for is_error in (False, True)}

    @contextlib.contextmanager
    def given_to(self, give: Give) -> Iterator[None]:
        """Give the records to one more that wants them."""
        self._wanting.append(give)
        while self._kept:
            give(self._kept.popleft())
        try:
            yield
        finally:
            self._wanting.remove(give)

    def emit(self, record: logging.LogRecord) -> None:
        """Give a record; from any thread."""
        budget = self._budgets[record.levelno >= logging.ERROR]
        left_out = budget.left_out
        if not budget.take():
            return
        try:
            told = LogRecord(
                level=record.levelno,
                logger=record.name,
                text=_sent(record.getMessage()[:_MAX_TEXT]),
                fields=json.dumps({**fields_of(record)}),
                traceback=_sent(traceback_of(record)[-_MAX_TEXT:]),  # the error is its end
            )
        except (KeyError, TypeError, ValueError):
            self.handleError(record)
            return
        if not self._wanting:
            self._stderr.handle(record)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody hears any more
            if left_out:
                text = f"({left_out:,} lines like the next are left out)"
                more = LogRecord(level=record.levelno, logger=record.name, text=text)
                self._loop.call_soon_threadsafe(self._give, more)
            self._loop.call_soon_threadsafe(self._give, told)

    def _give(self, record: LogRecord) -> None:
        if not self._wanting:
            self._kept.append(record)
        for give in self._wanting:
            give(record)


def _sent(text: str) -> str:
    """Return a text as the wire takes it: names of files may be no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def log_of_worker(told: LogRecord, worker: str) -> None:
    """Log what a worker has logged, as if it had happened here, with its name."""
    speaker = logging.getLogger(told.logger)
    if speaker.isEnabledFor(told.level):
        fields = json.loads(told.fields or "{}")
        record = speaker.makeRecord(
            *(speaker.name, told.level, "", 0, told.text, (), None),
            extra=with_fields(**{**fields, "worker": worker}),
        )
        record.exc_text = told.traceback or None
        speaker.handle(record)
