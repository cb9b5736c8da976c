"""gRPC's private core, cygrpc: the names of it that servers and connections here stand on.

No other file imports it. It promises nothing, so pyproject.toml bounds its versions above, and a
version without one of these names fails when this file is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

Pairs = Iterable[tuple[str, str | bytes]]  # metadata
Event = Any  # cygrpc has no types
Operation = Any  # one of a batch

Channel = cygrpc.Channel
CompletionQueue = cygrpc.CompletionQueue
Server = cygrpc.Server
auth_context = cygrpc.auth_context

CANCELLED: int = grpc.StatusCode.CANCELLED.value[0]
NO_FLAGS = 0

send_close = partial(cygrpc.SendCloseFromClientOperation, NO_FLAGS)  # no more messages
receive_message = partial(cygrpc.ReceiveMessageOperation, NO_FLAGS)
receive_metadata = partial(cygrpc.ReceiveInitialMetadataOperation, NO_FLAGS)  # at a client
receive_status = partial(cygrpc.ReceiveStatusOnClientOperation, NO_FLAGS)  # the end, at a client
receive_close = partial(cygrpc.ReceiveCloseOnServerOperation, NO_FLAGS)  # the end, at a server

_MAY_WAIT = cygrpc.WriteFlag.buffer_hint
_send_metadata = cygrpc.SendInitialMetadataOperation
_send_message = cygrpc.SendMessageOperation
_send_status = cygrpc.SendStatusFromServerOperation


def inner(credentials: grpc.ServerCredentials | grpc.ChannelCredentials) -> Any:
    """Return what the core takes for credentials."""
    return cast(Any, credentials)._credentials


def send_metadata(metadata: Pairs | None) -> Operation:
    """Send what comes before the first message."""
    return _send_metadata(metadata, NO_FLAGS)


def send_message(data: bytes, *, may_wait: bool = False) -> Operation:
    """Send a message; one that may wait goes with what comes behind it."""
    return _send_message(data, _MAY_WAIT if may_wait else NO_FLAGS)


def send_status(metadata: Pairs, code: grpc.StatusCode, details: str) -> Operation:
    """End a call, at its server."""
    return _send_status(metadata, code.value[0], details.encode(), NO_FLAGS)
