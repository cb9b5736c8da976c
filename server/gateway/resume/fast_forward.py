"""A second answer to a stream, until it has said what the client has from the first."""

from __future__ import annotations

from collections.abc import Mapping

from tokenweir.received import ReceivedSequence
from tokenweir.v1 import generation_service_pb2 as pb

from server.gateway.resume.received_answer import ReceivedAnswer, index_of_end
from server.gateway.views_pb2 import Delta, StreamView


class Different(Exception):
    """The second answer is not the first."""


class FastForward:
    """Recognises what the client has by lengths and hashes, and lets through what is behind it.

    The two may be cut into messages differently. Nothing of a sequence goes on before all that
    the client has of it was recognised.
    """

    def __init__(self, received: Mapping[int, pb.Received], answer: ReceivedAnswer) -> None:
        """Note the second answer in `answer`."""
        self._received = received
        self._answer = answer
        self._behind = {index for index, one in received.items() if any(_size(one))}

    @property
    def is_done(self) -> bool:
        """Whether all that the client has was said again."""
        return not self._behind

    def received(self) -> dict[int, pb.Received]:
        """Return what the client has now, by index: new things come of some sequences before."""
        found = {i: one.message(i) for i, one in self._answer.sequences().items()}
        return found | {index: self._received[index] for index in self._behind}

    def rest_of(self, message: bytes) -> bytes | None:
        """Return the part of a message that the client does not have; None if it has all of it.

        Raises Different.
        """
        view = StreamView.FromString(message)
        for delta in view.delta:
            return self._rest_of_delta(view, delta)
        for end in view.finished:
            return self._unless_known(message, end)
        if view.summary and self._behind:
            raise Different("it ended before that")
        return message

    def _rest_of_delta(self, view: StreamView, delta: Delta) -> bytes | None:
        index, own = delta.index, self._answer.sequence(delta.index)
        text, ids, logprobs = delta.text, list(delta.tokens.ids), list(delta.logprobs)
        if index in self._behind:
            one = self._received[index]
            t = one.text_bytes - own.text.length
            i = one.tokens - own.tokens.length
            p = one.logprobs - own.logprobs.length
            own.add(text[:t], ids[:i], logprobs[:p])
            text, ids, logprobs = text[t:], ids[i:], logprobs[p:]
            self._recognise(index, own)
            if not (text or ids or logprobs):
                return None
            if index in self._behind:
                raise Different(f"sequence {index} goes on elsewhere")
        own.add(text, ids, logprobs)
        delta.text = text
        delta.tokens.ids[:] = ids
        delta.logprobs[:] = logprobs
        return view.SerializeToString()

    def _unless_known(self, message: bytes, end: bytes) -> bytes | None:
        index = index_of_end(end)
        own = self._answer.sequence(index)
        own.end = end
        if index not in self._behind:
            return message
        self._recognise(index, own)
        if index in self._behind:
            raise Different(f"sequence {index} ended before that")
        return None

    def _recognise(self, index: int, own: ReceivedSequence) -> None:
        """Look at the hash once a sequence is as long as what the client has of it."""
        expected, found = self._received[index], own.message(index)
        if _size(found) != _size(expected):
            return
        if found.sha256 != expected.sha256:
            raise Different(f"sequence {index} is another one")
        self._behind.discard(index)


def _size(one: pb.Received) -> tuple[int, int, int, bool]:
    return one.text_bytes, one.tokens, one.logprobs, one.finished
