"""The id of a request: the client's, found in its message, or one made here."""

from __future__ import annotations

import uuid

from google.protobuf.message import Message

MAX_REQUEST_ID_CHARS = 128


def is_request_id(text: str) -> bool:
    """Return whether a client may call its request so; every other id stays out of logs, too."""
    return len(text) <= MAX_REQUEST_ID_CHARS and text.isprintable()


def made_request_id() -> str:
    """Return an id for a request that has none."""
    return str(uuid.uuid4())


def client_request_id(request: Message) -> str | None:
    """Return the id that the client gave; None without a good one."""
    inner = getattr(request, "request", request)  # GenerateStreamRequest has it one level down
    request_id = str(getattr(inner, "request_id", ""))
    return request_id if request_id and is_request_id(request_id) else None
