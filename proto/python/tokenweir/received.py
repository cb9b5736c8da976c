"""The received part of a stream: sizes and hashes of its sequences, and the names of its values."""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Sequence

from google.protobuf.descriptor import EnumDescriptor

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


class SeenMessages:
    """Lengths and hashes of what has come, of any number of sequences; nothing else is kept."""

    def __init__(self) -> None:
        self.num_messages = 0
        self.is_complete = False  # all of the answer has come
        self._sequences: defaultdict[int, ReceivedSequence] = defaultdict(ReceivedSequence)

    def add(self, message: pb.GenerateStreamResponse) -> None:
        """Note the next message."""
        self.num_messages += 1
        match message.WhichOneof("event"):
            case "delta":
                delta = message.delta
                logprobs = [one.SerializeToString() for one in delta.logprobs]
                sequence = self._sequences[delta.index]
                sequence.add(delta.text.encode(), delta.tokens.ids, logprobs)
            case "finished":
                end = message.finished
                self._sequences[end.index].end = end.SerializeToString()
            case "summary":
                self.is_complete = True

    def received(self) -> list[pb.Received]:
        """Return how much has come of each sequence, for a server to go on behind it."""
        return [one.message(index) for index, one in self._sequences.items()]


def enum_name(enum: EnumDescriptor, value: int) -> str:
    """Return the name of a value in small letters; the number of one newer than this client."""
    known = enum.values_by_number.get(value)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return known.name.removeprefix(prefix).lower() if known else str(value)
