"""Lets what goes to one client in the same moment leave in one write.

gRPC writes each message by itself, and each wakes the client. A socket of Linux that is corked
keeps what is written until it is uncorked, for 0.2 seconds at most.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from urllib.parse import unquote
from weakref import WeakValueDictionary

_DESCRIPTORS = "/proc/self/fd"
_CORK: int | None = getattr(socket, "TCP_CORK", None)  # only Linux has it
_LEAST = 3  # calls, for which looking for a socket pays
_MOST_FILES = 256  # of this process, among which one is looked for: each takes 20 us
_MOST = 32  # writes of a burst; then what is held back goes
_PAUSE = 50  # times as long as looking for a socket took, before another one is looked for
_MAPPED = "::ffff:"  # begins an address of IPv4 as a socket of IPv6 has it


class Connections:
    """Those of a server that have calls, by the address of the client; any thread may ask."""

    def __init__(self) -> None:
        self.burst = Burst()
        self._next_look = 0.0  # on the monotonic clock
        self._lock = threading.Lock()
        self._found: WeakValueDictionary[bytes, Connection] = WeakValueDictionary()

    def of(self, peer: bytes) -> Connection:
        """Return the connection of a client, whose address is as gRPC writes it."""
        with self._lock:
            if (found := self._found.get(peer)) is None:
                found = self._found[peer] = Connection(peer, self)
            return found

    def may_look(self) -> bool:
        """Say whether it is time to look for another socket: clients that come and go cost more."""
        return time.monotonic() >= self._next_look

    def looked(self, seconds: float) -> None:
        """Note what looking for a socket took."""
        self._next_look = time.monotonic() + _PAUSE * seconds


class Connection:
    """One client's connection, as long as somebody has it."""

    def __init__(self, peer: bytes, others: Connections) -> None:
        self.peer = peer
        self._others = others
        self._socket: socket.socket | None = None
        self._is_looked_for = False

    def note_write(self, call: object) -> None:
        """Know that something is to be written to a call, see Burst."""
        self._others.burst.note_write(self, call)

    def cork(self, is_corked: bool) -> None:
        """Hold back what is written from now on, or let it go; nothing where that is not known."""
        if _CORK is None:
            return
        with suppress(OSError):  # the client has gone, or this process has no list of its files
            if not self._is_looked_for and self._others.may_look():
                self._look()
            if self._socket is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, _CORK, is_corked)

    def _look(self) -> None:
        started = time.monotonic()
        self._is_looked_for = True
        self._socket = _socket_to(self.peer)
        self._others.looked(time.monotonic() - started)

    def __del__(self) -> None:
        if self._socket is not None:
            self._socket.close()


class Burst:
    """What one thread writes before it waits: once it is for several calls of a client, held back.

    What a call alone says goes at once: a socket is looked for anew when a client had no calls.
    """

    def __init__(self) -> None:
        self._thread = 0
        self._num_writes = 0
        self._first: dict[Connection, object] = {}  # calls
        self._corked: set[Connection] = set()

    def begin(self) -> None:
        """Be that of the thread that calls, from now on."""
        self.end()
        self._thread = threading.get_ident()

    def note_write(self, connection: Connection, call: object) -> None:
        """Note that something is to be written to a call; other threads do not count."""
        if threading.get_ident() != self._thread:
            return
        self._num_writes += 1
        if self._num_writes > _MOST:
            self.end()
        if self._first.setdefault(connection, call) is not call and connection not in self._corked:
            self._corked.add(connection)
            connection.cork(True)

    def end(self) -> None:
        """Let all go that was held back."""
        self._num_writes = 0
        self._first.clear()
        while self._corked:
            self._corked.pop().cork(False)


class Corked:
    """A block in which what is written to several calls of a connection is held back."""

    __slots__ = ("_connections",)

    def __init__(self, connections: Sequence[Connection]) -> None:
        """Take the connections of all calls that are to be written to."""
        self._connections = _crowded(connections) if len(connections) >= _LEAST else []

    def __enter__(self) -> None:
        for one in self._connections:
            one.cork(True)

    def __exit__(self, *error: object) -> None:
        for one in self._connections:
            one.cork(False)


def _crowded(connections: Iterable[Connection]) -> list[Connection]:
    counts: dict[Connection, int] = {}  # a Counter costs several times as much
    for one in connections:
        counts[one] = counts.get(one, 0) + 1
    return [one for one, count in counts.items() if count >= _LEAST]


def _socket_to(peer: bytes) -> socket.socket | None:
    """Return a socket of this process that is connected to an address; None without one."""
    kind, _, address = unquote(peer.decode()).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    wanted = host.strip("[]"), int(port)
    names = os.listdir(_DESCRIPTORS)
    if len(names) > _MOST_FILES:  # a thousand clients that come again would wait for each other
        return None
    for name in names:
        if (found := _opened(name)) is not None:
            if _address_of_peer(found) == wanted:
                return found
            found.close()
    return None


def _opened(name: str) -> socket.socket | None:
    """Return a file of this process as a socket with a descriptor of its own; None if it is none.

    What has a descriptor of its own cannot become something else when gRPC closes it.
    """
    try:
        if not os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
            return None
        return socket.socket(fileno=os.dup(int(name)))
    except OSError:  # it was closed meanwhile
        return None


def _address_of_peer(one: socket.socket) -> tuple[str, int] | None:
    try:
        name = one.getpeername()
    except OSError:  # it listens
        return None
    if not isinstance(name, tuple):  # a path
        return None
    return str(name[0]).removeprefix(_MAPPED), int(name[1])
