"""The answer of one worker to a stream so far."""

from __future__ import annotations

from tokenweir.received import ReceivedSequence
from tokenweir.v1 import common_pb2
from tokenweir.v1 import generation_service_pb2 as pb

from server.gateway.views_pb2 import RunView, StreamView

_MAX_BYTES = 16 * 2**10  # kept at most until they are looked at


class ReceivedAnswer:
    """Lengths and hashes of all sequences of one answer.

    Messages are looked at when there are some kilobytes of them, or somebody asks: most streams
    end before.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, ReceivedSequence] = {}
        self._has_summary = False
        self._waiting = bytearray()

    def add(self, message: bytes) -> None:
        """Note a message."""
        self._waiting += message
        if len(self._waiting) > _MAX_BYTES:
            self._look()

    def sequence(self, index: int) -> ReceivedSequence:
        """Return what has come of a sequence, to be added to."""
        self._look()
        return self._of(index)

    def sequences(self) -> dict[int, ReceivedSequence]:
        """Return what has come of all sequences, by index."""
        self._look()
        return self._sequences

    @property
    def is_complete(self) -> bool:
        """Whether the answer has ended."""
        self._look()
        return self._has_summary

    def _look(self) -> None:
        if not self._waiting:
            return
        data = bytes(self._waiting)
        self._waiting.clear()
        run = RunView.FromString(data)
        if not run.delta.index:  # all are of the first sequence
            deltas = run.delta
            if deltas.text or deltas.tokens or deltas.logprobs:
                tokens = common_pb2.TokenIds.FromString(b"".join(deltas.tokens))
                self._of(0).add(b"".join(deltas.text), tokens.ids, deltas.logprobs)
        else:
            for delta in StreamView.FromString(data).delta:
                self._of(delta.index).add(delta.text, delta.tokens.ids, delta.logprobs)
        for end in run.finished:
            self._of(index_of_end(end)).end = end
        self._has_summary = self._has_summary or bool(run.summary)

    def _of(self, index: int) -> ReceivedSequence:
        if (found := self._sequences.get(index)) is None:
            found = self._sequences[index] = ReceivedSequence()
        return found


def index_of_end(finished: bytes) -> int:
    """Return the index of the sequence that a serialized Finished ends."""
    return pb.GenerateStreamResponse.Finished.FromString(finished).index
