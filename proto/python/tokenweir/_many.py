"""Divides a request with many inputs into calls that a server takes, and joins their answers."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from tokenweir._errors import BrokenStream, FieldViolation, TokenweirClientError
from tokenweir.v1 import common_pb2

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)

_MOST_INPUTS, _MOST_BYTES = 64, 2**20  # of a call, what a server takes unless it is told otherwise


class ManyCalls(Generic[RequestT, ResponseT]):
    """The calls by which a request is made, one after the other.

    One that is too large for the server, or whose answer is for the client, is made in two halves.
    """

    def __init__(self, request: RequestT) -> None:
        self._field = "inputs" if "inputs" in request.DESCRIPTOR.fields_by_name else "items"
        self._inputs: Sequence[Message] = getattr(request, self._field)
        self._options = type(request)()
        self._options.CopyFrom(request)
        self._options.ClearField(self._field)
        self._sizes = deque(_sizes(self._inputs, _MOST_BYTES - self._options.ByteSize()))
        self._num_answered = 0
        self._answers: list[ResponseT] = []

    def next(self) -> RequestT | None:
        """Return the next call; None behind the last."""
        if not self._sizes:
            return None
        request = type(self._options)()
        request.CopyFrom(self._options)
        first = self._num_answered
        getattr(request, self._field).extend(self._inputs[first : first + self._sizes[0]])
        return request

    def answered(self, response: ResponseT) -> None:
        """Take the answer to the call in; BrokenStream for one to another number of inputs."""
        size = self._sizes[0]
        if (count := len(getattr(response, _results_of(response)))) != size:
            raise BrokenStream(f"{count} results came back for {size} {self._field}")
        self._sizes.popleft()
        self._num_answered += size
        self._answers.append(response)
        seed = response.provenance.seed  # type: ignore[attr-defined]  # every answer has one
        if seed:  # which serves all inputs of a request
            sampling: Any = self._options.decoding.sampling  # type: ignore[attr-defined]
            sampling.seed = seed

    def failed(self, error: TokenweirClientError) -> None:
        """Make the call in halves where that may help; else raise the error, of all inputs."""
        size = self._sizes[0]
        fields = {violation.field for violation in error.violations}
        if size > 1 and (error.reason == "MESSAGE_TOO_LARGE" or fields == {self._field}):
            self._sizes.popleft()
            self._sizes.extendleft((size - size // 2, size // 2))
            return
        if self._num_answered:
            error.args = (self._renumbered(error.args[0]), *error.args[1:])
            error.violations = tuple(
                FieldViolation(self._renumbered(one.field), one.description)
                for one in error.violations
            )
        raise error

    def joined(self) -> ResponseT:
        """Return the answers as that to one call."""
        whole = type(self._answers[0])()
        for one in self._answers:
            usage, timing = _sum(whole, one), _longest(whole, one)
            provenance = self._answers[0].provenance  # type: ignore[attr-defined]
            whole.MergeFrom(one)
            for field, value in (("usage", usage), ("timing", timing), ("provenance", provenance)):
                getattr(whole, field).CopyFrom(value)
        return whole

    def _renumbered(self, text: str) -> str:
        first = self._num_answered
        pattern = rf"\b{self._field}\[(\d+)\]"
        return re.sub(pattern, lambda found: f"{self._field}[{int(found[1]) + first}]", text)


def _sizes(inputs: Sequence[Message], most_bytes: int) -> list[int]:
    """Return how many inputs each call has, at least one."""
    sizes, num_bytes = [0], 0
    for one in inputs:
        size = one.ByteSize() + 8  # with what stands before it
        if sizes[-1] and (sizes[-1] == _MOST_INPUTS or num_bytes + size > most_bytes):
            sizes.append(0)
            num_bytes = 0
        sizes[-1] += 1
        num_bytes += size
    return sizes  # of no inputs one call, which is refused


def _results_of(response: Message) -> str:
    fields = response.DESCRIPTOR.fields
    return next(field.name for field in fields if field.name in ("results", "scores", "vectors"))


def _sum(whole: Any, one: Any) -> common_pb2.Usage:
    usage = common_pb2.Usage()
    for field in usage.DESCRIPTOR.fields_by_name:
        setattr(usage, field, getattr(whole.usage, field) + getattr(one.usage, field))
    return usage


def _longest(whole: Any, one: Any) -> common_pb2.Timing:
    timings: list[common_pb2.Timing] = [whole.timing, one.timing]
    steps = sum(timing.steps for timing in timings)
    shared = sum(timing.steps * timing.mean_batch_size for timing in timings)
    longest = common_pb2.Timing(steps=steps, mean_batch_size=shared / steps if steps else 0.0)
    for field in ("queue", "prefill", "decode", "time_to_first_token"):
        durations = [getattr(timing, field) for timing in timings]
        getattr(longest, field).CopyFrom(max(durations, key=lambda one: one.ToNanoseconds()))
    return longest
