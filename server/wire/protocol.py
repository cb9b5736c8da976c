"""Versions and limits of work.proto, which both sides of the wire know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from server.api import RELEASE
from server.wire.work_pb2 import MORE_OF_MESSAGE, Hello, More, Pair

# One more with every change of work.proto that the version before does not know, and one more at
# most in a release: neighbouring releases work together, so a service is updated worker by worker.
VERSION = 1
METHOD = "/tokenweir.server.Work/Carry"
CHUNK = 1 << 16  # bytes of a request or message that go at once
MAX_BYTES = 4 * CHUNK  # the longest message, its last call and chunk among them
NUM_UNTAKEN = 16  # messages of a call that a worker may say before some are taken, see `weight`
NUM_TAKEN = NUM_UNTAKEN // 2  # a gateway tells when it has taken so many
NUM_UNHEARD = 256  # messages that a worker may say before some are looked at
NUM_HEARD = NUM_UNHEARD // 4  # messages that a gateway says it has looked at, at least

Metadata = tuple[tuple[str, str | bytes], ...]

_MUCH = 1 << 13  # bytes
_BINARY = "-bin"  # ends the names of metadata that are bytes


def hello(
    state_period: float = 0.0, *, wants_log: bool = False, only_watches: bool = False
) -> Hello:
    """Return what this side says first."""
    return Hello(
        version=VERSION,
        release=RELEASE,
        state_period=state_period,
        wants_log=wants_log,
        only_watches=only_watches,
    )


def mismatch(gateway: Hello, worker: Hello) -> str:
    """Return why two sides cannot work together; "" if they can. One that says nothing is of 0."""
    if min(gateway.version, worker.version) and abs(gateway.version - worker.version) <= 1:
        return ""
    return (
        f"a gateway of Tokenweir {gateway.release} (version {gateway.version} of the wire) and a "
        f"worker of Tokenweir {worker.release} (version {worker.version}) do not work together: "
        "their versions have to be neighbours; update the older one"
    )


def weight(message: bytes) -> int:
    """Return for how many messages one counts: a long one for several, for the gateway holds it."""
    return 1 + len(message) // _MUCH


def chunks_of(message: bytes, last: More.ValueType) -> Iterator[tuple[bytes, More.ValueType]]:
    """Return a message as it goes, in pieces: each with what comes behind it."""
    for start in range(0, max(1, len(message)), CHUNK):
        piece = message[start : start + CHUNK]
        yield piece, MORE_OF_MESSAGE if start + CHUNK < len(message) else last


def pairs_of(metadata: Iterable[tuple[str, str | bytes]]) -> list[Pair]:
    """Return metadata as it is sent."""
    return [
        Pair(key=key, value=value.encode() if isinstance(value, str) else value)
        for key, value in metadata
    ]


def metadata_of(pairs: Iterable[Pair]) -> Metadata:
    """Return metadata as it was before `pairs_of`."""
    return tuple(
        (one.key, one.value if one.key.endswith(_BINARY) else one.value.decode(errors="replace"))
        for one in pairs
    )
