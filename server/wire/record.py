"""The record of the call that a worker is answering; its gateway gets it with the end."""

from __future__ import annotations

from contextvars import ContextVar

from server.wire.work_pb2 import Record

_current: ContextVar[Record] = ContextVar("record")


def current_record() -> Record:
    """Return the record of the call that is being answered; one that no gateway reads without."""
    return _current.get(None) or Record()


def begin_record() -> Record:
    """Start a new record for the call that is being answered."""
    record = Record()
    _current.set(record)
    return record
