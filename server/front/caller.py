"""Calls of the server behind as who called the one in front: with his token and his trace."""

from __future__ import annotations

from collections.abc import Mapping

from tokenweir import AsyncClient

HEALTH_SECONDS = 5.0  # for the server behind to say how it is


def client_as(client: AsyncClient, headers: Mapping[str, str]) -> AsyncClient:
    """Return a client that calls as the headers of a request say; ValueError for no token."""
    header = headers.get("authorization")
    trace = [
        (name, value)
        for name in ("traceparent", "tracestate")
        if (value := headers.get(name, "")) and value.isascii()
    ]
    if header is None:
        return client.calling_as(metadata=trace)
    kind, _, token = header.partition(" ")
    if kind.lower() != "bearer":
        raise ValueError("Authorization is to be: Bearer TOKEN")
    return client.calling_as(token.strip(), metadata=trace)
