"""Carries messages between a worker and the process of its engine, over a pair of sockets.

A message is pickled, with its length before it. Both ends are processes of one program, the sockets
have no name that others could find, and what clients send is in messages as the numbers and texts
that this program has made of it: so nobody else decides what is unpickled.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections import deque

_LENGTH = struct.Struct("!Q")
_NUM_BYTES = 1 << 18  # that are read at once


def packed(message: object) -> bytes:
    """Return a message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Unpacker:
    """Makes messages of the bytes that have come, however those are cut."""

    def __init__(self) -> None:
        self._data = bytearray()

    def push(self, data: bytes) -> list[object]:
        """Take in more bytes; return the messages that are whole now."""
        self._data += data
        messages: list[object] = []
        start = 0
        with memoryview(self._data) as view:
            while (first := start + _LENGTH.size) <= len(view):
                end = first + _LENGTH.unpack_from(view, start)[0]
                if end > len(view):
                    break
                messages.append(pickle.loads(view[first:end]))
                start = end
        del self._data[:start]
        return messages


class Wire:
    """An end of the pair that waits: one thread receives, any may send."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.unpacker = Unpacker()
        self._came: deque[object] = deque()
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message, waiting while the other end has too much that it has not read.

        Raises OSError if it is gone.
        """
        data = packed(message)
        with self._sending:
            self.socket.sendall(data)

    def receive(self) -> object:
        """Wait for the next message; EOFError if there is no more."""
        while not self._came:
            try:
                data = self.socket.recv(_NUM_BYTES)
            except ConnectionError:  # it has ended with bytes unread
                data = b""
            if not data:
                raise EOFError("the other end is gone")
            self._came += self.unpacker.push(data)
        return self._came.popleft()

    def unread(self) -> list[object]:
        """Return the messages that have come and were not received."""
        messages = list(self._came)
        self._came.clear()
        return messages
