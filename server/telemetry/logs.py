"""Log lines of a server's processes, on the standard error: for people, or JSON.

A record may have `fields`, values by name that are not in its message: `extra=with_fields(...)`.
Those of a worker come over its connection to the command, which writes them with its own.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from server.settings import Log

OWN_LOGGERS = ("server", "engine")  # other loggers write errors only
REQUESTS = "server.requests"  # the logger of the one line that every request has

RECORDS_PER_SECOND = 10.0  # on average, of a LogBudget
RECORDS_AT_ONCE = 100
_WORD = re.compile(r"[!#-<>-~]+")  # printable ASCII without spaces, quotes and "="
Fields = Mapping[str, str | int | float]


def with_fields(**fields: str | int | float) -> dict[str, Fields]:
    """Return the `extra` of a call of a logger."""
    return {"fields": fields}


def fields_of(record: logging.LogRecord) -> Fields:
    """Return what a record has beside its message."""
    fields: Fields = getattr(record, "fields", {})
    return fields


def set_level(config: Log) -> None:
    """Set up logging of this process by the settings."""
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(config.level.upper())
    logging.getLogger(REQUESTS).setLevel(logging.NOTSET if config.requests else logging.WARNING)


def log_to_stderr(config: Log) -> None:
    """Write what this process logs, and what it is told of others, to the standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter_of(config))
    logging.basicConfig(handlers=[handler], level=logging.ERROR)
    set_level(config)


def formatter_of(config: Log) -> TextFormatter | JsonFormatter:
    """Return what makes lines of records."""
    return JsonFormatter() if config.format == "json" else TextFormatter()


class TextFormatter(logging.Formatter):
    """`2026-11-22 16:04:05,678 worker 127.0.0.1:4711: request id=7 model=dates`."""

    def __init__(self) -> None:
        super().__init__("%(message)s")
        self._second, self._told_second = 0, ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        created, fields = record.created, fields_of(record)
        if (second := int(created)) != self._second:
            told = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
            self._second, self._told_second = second, told
        worker = fields.get("worker")
        speaker = f"worker {worker}: " if worker else ""
        pairs = [f" {name}={_plain(value)}" for name, value in fields.items() if name != "worker"]
        milliseconds = int((created - second) * 1000)
        return f"{self._told_second},{milliseconds:03d} {speaker}{record.message}{''.join(pairs)}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line; a traceback is one of its values."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if traceback := traceback_of(record):
            line["traceback"] = traceback
        return json.dumps(line)


def traceback_of(record: logging.LogRecord) -> str:
    """Return the traceback of a record; "" without one."""
    if record.exc_info and not record.exc_text:
        return logging.Formatter().formatException(record.exc_info)
    return record.exc_text or ""


def _plain(value: str | int | float) -> str:
    """Return a value in one word; what clients have chosen may look like anything."""
    if isinstance(value, str):
        return value if _WORD.fullmatch(value) else json.dumps(value)
    return f"{value:.6g}" if isinstance(value, float) else f"{value}"


class LogBudget:
    """So many records a second on average, more at once after a pause; others are counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
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
