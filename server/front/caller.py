"""Calls of the server behind as who called the one in front: his token, his name, his trace."""

from __future__ import annotations

from collections.abc import Mapping

from tokenweir import AsyncClient

from server.identity.certified import CERTIFIED_KEY

HEALTH_SECONDS = 5.0  # for the server behind to say how it is


def client_as(
    client: AsyncClient, headers: Mapping[str, str], certified: str | None = None
) -> AsyncClient:
    """Return a client that calls as the headers of a request say; ValueError for no token.

    `certified` is the name on the certificate that came with the request.
    """
    header = headers.get("authorization")
    told: list[tuple[str, str | bytes]] = [
        (name, value)
        for name in ("traceparent", "tracestate")
        if (value := headers.get(name, "")) and value.isascii()
    ]
    if certified is not None:
        told.append((CERTIFIED_KEY, certified.encode()))
    if header is None:
        return client.calling_as(metadata=told)
    kind, _, token = header.partition(" ")
    if kind.lower() != "bearer":
        raise ValueError("Authorization is to be: Bearer TOKEN")
    return client.calling_as(token.strip(), metadata=told)
