"""What the processes of a server write to the standard error: lines for people, or JSON.

A record may have `fields`, values by name that are not in its message: `extra=with_fields(...)`.
Those of a worker come over its connection to the command, which writes them with its own.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from server.config import LogConfig

OWN_LOGGERS = ("server", "engine")  # of others only errors are written
REQUESTS = "server.requests"  # the logger of the one line that every request has

Fields = Mapping[str, str | int | float]


def with_fields(**fields: str | int | float) -> dict[str, Fields]:
    """Return the `extra` of a call of a logger."""
    return {"fields": fields}


def fields_of(record: logging.LogRecord) -> Fields:
    """Return what a record has beside its message."""
    fields: Fields = getattr(record, "fields", {})
    return fields


def set_level(config: LogConfig) -> None:
    """Let this process log what the settings ask for."""
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(config.level.upper())
    logging.getLogger(REQUESTS).setLevel(logging.NOTSET if config.requests else logging.WARNING)


def log_to_stderr(config: LogConfig) -> None:
    """Write what this process logs, and what it is told of others, to the standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.ERROR)
    set_level(config)


class TextFormatter(logging.Formatter):
    """`2026-11-22 16:04:05,678 worker 127.0.0.1:4711: request id=7 model=dates`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = dict(fields_of(record))
        worker = fields.pop("worker", "")
        pairs = "".join(f" {name}={_plain(value)}" for name, value in fields.items())
        speaker = f"worker {worker}: " if worker else ""
        return f"{self.formatTime(record)} {speaker}{record.message}{pairs}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line; a traceback is one of its values."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        line: dict[str, Any] = {
            "time": time,
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
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    is_word = text.isascii() and text.isprintable() and not set(text) & {" ", '"', "="}
    return text if text and is_word else json.dumps(text)
