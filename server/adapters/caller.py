"""Calls the server behind on behalf of a client of the one in front: its token, name and trace."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from tokenweir import AsyncClient, NotFound, TokenweirClientError

from server.auth.certified import CERTIFIED_KEY

_HEALTH_SECONDS = 5.0  # for the server behind to say how it is
STREAM_ATTEMPTS = 3  # a stream that has begun goes on where it broke: its reader cannot ask for it


async def is_serving(client: AsyncClient, name: str = "") -> bool:
    """Return whether a model serves, "" for the server behind; NotFound for an unknown one."""
    try:
        async with asyncio.timeout(_HEALTH_SECONDS):
            return await client.health(name) == "SERVING"
    except NotFound:
        raise
    except (TokenweirClientError, TimeoutError):
        return False


def client_as(
    client: AsyncClient, headers: Mapping[str, str], certified: str | None = None
) -> AsyncClient:
    """Return a client that calls as the headers of a request say.

    `certified` is the name on the certificate that came with the request. An `authorization` of
    another scheme, or without a token, is as none: the server behind says whether it needs one.
    """
    told: list[tuple[str, str | bytes]] = [
        (name, value)
        for name in ("traceparent", "tracestate")
        if (value := headers.get(name, "")) and value.isascii()
    ]
    if certified is not None:
        told.append((CERTIFIED_KEY, certified.encode()))
    scheme, _, token = headers.get("authorization", "").partition(" ")
    is_token = scheme.lower() == "bearer" and re.fullmatch(r"[!-~]+", token.strip())
    shown = token.strip() if is_token else None
    return client.calling_as(shown, metadata=told, stream_attempts=STREAM_ATTEMPTS)
