"""The received part of a stream's sequence: its size and a hash, however it was cut."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from tokenweir.v1 import generation_service_pb2 as pb

ORIGIN_KEY = "tokenweir-origin"  # initial metadata of a stream that can be resumed


class Strand:
    """All of one kind that has come of a sequence: its length, and its hash."""

    __slots__ = ("_hash", "length")

    def __init__(self) -> None:
        self.length = 0
        self._hash = hashlib.sha256()

    def add(self, data: bytes, length: int) -> None:
        """Add `data`, which makes it longer by `length`."""
        self.length += length
        self._hash.update(data)

    def digest(self) -> bytes:
        """Return the hash of all that was added."""
        return self._hash.digest()


class ReceivedSequence:
    """Text, ids, log-probabilities and end of one sequence, as far as they have come."""

    __slots__ = ("end", "logprobs", "text", "tokens")

    def __init__(self) -> None:
        self.text, self.tokens, self.logprobs = Strand(), Strand(), Strand()
        self.end = b""  # the serialized Finished, once it has come

    def add(self, text: bytes, ids: Sequence[int], logprobs: Sequence[bytes]) -> None:
        """Add what a delta has brought, or several after each other.

        Log-probabilities are serialized, a PositionLogprobs each.
        """
        if text:
            self.text.add(text, len(text))
        if ids:
            self.tokens.add(struct.pack(f"<{len(ids)}i", *ids), len(ids))
        if logprobs:
            self.logprobs.add(b"".join(logprobs), len(logprobs))

    def message(self, index: int) -> pb.Received:
        """Return what the protocol says of it."""
        strands = (self.text, self.tokens, self.logprobs)
        digests = (*(strand.digest() for strand in strands), hashlib.sha256(self.end).digest())
        return pb.Received(
            index=index,
            text_bytes=self.text.length,
            tokens=self.tokens.length,
            logprobs=self.logprobs.length,
            finished=bool(self.end),
            sha256=hashlib.sha256(b"".join(digests)).digest(),
        )
