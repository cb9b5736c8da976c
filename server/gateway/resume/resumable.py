"""A stream of a client, which several workers may answer, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from google.protobuf.message import DecodeError
from tokenweir.received import ORIGIN_KEY
from tokenweir.v1 import generation_service_pb2 as pb

from engine.errors import FieldViolation, InvalidRequest
from server.calls.call_server import ServerCall
from server.gateway.resume.fast_forward import Different, FastForward
from server.gateway.resume.received_answer import ReceivedAnswer
from server.wire.protocol import Metadata

STREAM = "/tokenweir.v1.GenerationService/GenerateStream"

_Passed = Callable[[bool], object]
_MAX_SEQUENCES = 1024  # per stream; what is received of each is kept while it runs


def asked_at_first(request: bytes) -> bytes:
    """Return a request for a stream as it was before its client asked to go on with it."""
    try:
        found = pb.GenerateStreamRequest.FromString(request)
    except DecodeError:
        return request
    for name in ("resume_after", "received", "origin"):
        found.ClearField(name)
    return found.SerializeToString(deterministic=True)


class ResumableStream:
    """Hands on to a client what workers send, and nothing of it twice.

    A worker says where its answer comes from: what package, server and processor, and by which
    seed. Another one of the same origin gives the same, so it begins again, and what the client
    has is left out. A WorkerCall takes this for the call of the client.
    """

    def __init__(self, client: ServerCall, request: bytes) -> None:
        """`request` is that of the client."""
        self.request = request  # for the next worker
        self.has_begun = False  # to send something to the client
        self.is_answered = False  # by the last worker, that may be lost since
        self._is_of_another_origin = False  # the last answer
        self.difference = ""  # between the last answer and what the client has
        self._client = client
        self._origin = ""
        self._is_second = False  # not the first answer to the request, so messages have new numbers
        self._num_messages = 0  # messages that the client has
        self._answer = ReceivedAnswer()
        self._fast_forward: FastForward | None = None

    def resume(self) -> None:
        """Continue after the part that a client has, if its request tells of one.

        No worker gets those fields. Raises InvalidRequest for more sequences than a stream has.
        """
        try:
            request = pb.GenerateStreamRequest.FromString(self.request)
        except DecodeError:  # the worker says so
            return
        if not request.HasField("resume_after") or not request.origin:
            return
        if (number := len(request.received)) > _MAX_SEQUENCES:
            what = f"{number} sequences are more than a stream has, {_MAX_SEQUENCES} at most"
            raise InvalidRequest([FieldViolation("received", what)])
        self._origin, self._num_messages = request.origin, max(0, request.resume_after)
        received = {one.index: one for one in request.received}
        request.ClearField("resume_after")
        request.ClearField("received")
        self.request = request.SerializeToString()
        self._begin(received)

    @property
    def was_refused(self) -> bool:
        """Whether the last answer was ended here."""
        return self._is_of_another_origin or bool(self.difference)

    @property
    def can_go_on(self) -> bool:
        """Whether another worker can go on where the last one has ended."""
        return bool(self._origin)

    @property
    def is_complete(self) -> bool:
        """Whether the client has all of the answer, but for its status."""
        return self._fast_forward is None and self._answer.is_complete

    def begin_again(self) -> None:
        """Get ready for another worker, that says everything from its beginning."""
        self.is_answered = self._is_of_another_origin = False
        if not self._is_second:
            self.request += pb.GenerateStreamRequest(origin=self._origin).SerializeToString()
        if self._fast_forward is not None:
            self._begin(self._fast_forward.received())
        else:
            self._begin({i: one.message(i) for i, one in self._answer.sequences().items()})

    def pass_metadata(self, metadata: Metadata, passed: _Passed) -> None:
        """Hand on what comes first, of the first worker; see ServerCall.pass_message."""
        origin = next((str(value) for key, value in metadata if key == ORIGIN_KEY), "")
        if self._is_second and origin != self._origin:
            self._is_of_another_origin = True
            passed(False)
            return
        self._origin, self.is_answered = origin, True
        if self.has_begun:
            passed(True)
            return
        self.has_begun = True
        self._client.pass_metadata(metadata, passed)

    def pass_message(self, message: bytes, passed: _Passed, *, is_followed: bool) -> None:
        """Hand on what of a message the client has not; see ServerCall.pass_message."""
        rest = self._rest_of(message)
        if rest is None:
            passed(not self.difference)
        else:  # the client may have what follows in a second answer
            is_followed = is_followed and not self._is_second
            self._client.pass_message(rest, passed, is_followed=is_followed)

    def pass_end(self, message: bytes | None, trailing_metadata: Metadata) -> bool:
        """Hand on the end, with what of the last message the client has not."""
        rest = None if message is None else self._rest_of(message)
        return not self.difference and self._client.pass_end(rest, trailing_metadata)

    def _rest_of(self, message: bytes) -> bytes | None:
        """Return what is to be sent of a message; None if there is nothing, or it differs."""
        rest: bytes | None = message
        if self._origin and self._is_second:
            rest = self._new_of(message)
        elif self._origin:
            self._answer.add(message)
        if rest is not None:
            self.has_begun = True
            self._num_messages += 1
        return rest

    def _begin(self, received: Mapping[int, pb.Received]) -> None:
        self._is_second = True
        self._answer = ReceivedAnswer()
        self._fast_forward = FastForward(received, self._answer)

    def _new_of(self, message: bytes) -> bytes | None:
        """Return what is to be sent of a message of a second answer."""
        if self._fast_forward is not None and self._fast_forward.is_done:
            self._fast_forward = None
        if self._fast_forward is None:
            self._answer.add(message)
            return _numbered(message, self._num_messages + 1)
        try:
            rest = self._fast_forward.rest_of(message)
        except (Different, DecodeError) as error:
            self.difference = str(error)
            return None
        return None if rest is None else _numbered(rest, self._num_messages + 1)


def _numbered(message: bytes, number: int) -> bytes:
    """Return a message with this sequence number: what comes later in its bytes counts."""
    return message + pb.GenerateStreamResponse(sequence_number=number).SerializeToString()
