"""Divides a request with many inputs into calls that a server takes, and joins their answers."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from tokenweir._errors import BrokenStream, FieldViolation, InvalidArgument, TokenweirClientError
from tokenweir.v1 import common_pb2


class _Found(Protocol):
    @property
    def results(self) -> tuple[Any, ...]: ...


RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
FoundT = TypeVar("FoundT", bound=_Found)

_MOST_INPUTS, _MOST_BYTES = 64, 2**20  # a server's default limits of a call
_RESULTS = ("results", "scores", "vectors")


class ManyCalls(Generic[RequestT, ResponseT]):
    """The calls by which a request is made, one after the other.

    One that is too large for the server, or whose answer is for the client, is made in two halves,
    and one of which inputs are refused is made without them.
    """

    def __init__(self, request: RequestT, options: Mapping[str, Any]) -> None:
        self._field = "inputs" if "inputs" in request.DESCRIPTOR.fields_by_name else "items"
        self._inputs: Sequence[Message] = getattr(request, self._field)
        self._options = type(request)()
        self._options.CopyFrom(request)
        self._options.ClearField(self._field)
        self._calls = deque(_divided(self._inputs, _MOST_BYTES - self._options.ByteSize()))
        self._answers_others = options.get("answer_others") is not False
        self._answers: dict[int, Message] = {}  # by the place of the input
        self._responses: list[ResponseT] = []
        self._refusal: InvalidArgument | None = None

    def next(self) -> RequestT | None:
        """Return the next call; None behind the last."""
        if not self._calls:
            return None
        request = type(self._options)()
        request.CopyFrom(self._options)
        getattr(request, self._field).extend(self._inputs[place] for place in self._calls[0])
        return request

    def answered(self, response: ResponseT) -> None:
        """Take the answer to the call in; BrokenStream for one to another number of inputs."""
        places, results = self._calls[0], _results_of(response)
        if len(results) != len(places):
            raise BrokenStream(f"{len(results)} results came back for {len(places)} {self._field}")
        self._calls.popleft()
        self._answers.update(zip(places, results, strict=True))
        self._responses.append(response)
        seed = response.provenance.seed  # type: ignore[attr-defined]  # every answer has one
        if seed:  # which serves all inputs of a request
            sampling: Any = self._options.decoding.sampling  # type: ignore[attr-defined]
            sampling.seed = seed

    def failed(self, error: TokenweirClientError) -> None:
        """Make the call in another way where that may help; else raise the error."""
        places = self._calls[0]
        fields = {violation.field for violation in error.violations}
        if len(places) > 1 and (error.reason == "MESSAGE_TOO_LARGE" or fields == {self._field}):
            half = len(places) // 2
            self._calls.popleft()
            self._calls.extendleft((places[half:], places[:half]))
            return
        refused = {self._place(field) for field in fields}
        error.args = (self._renumbered(error.args[0]),)
        error.violations = tuple(
            FieldViolation(self._renumbered(one.field), one.description) for one in error.violations
        )
        is_of_inputs = isinstance(error, InvalidArgument) and refused and None not in refused
        if not (is_of_inputs and self._answers_others):
            raise error
        self._note(error)
        self._calls.popleft()
        if others := [place for place in places if place not in refused]:
            self._calls.appendleft(others)

    @property
    def places(self) -> Sequence[int]:
        """The places of the inputs that were answered."""
        return sorted(self._answers)

    @property
    def response(self) -> ResponseT:
        """All answers as that to one call; the refusal if all inputs were refused."""
        if self._refusal is not None and not self._responses:
            raise self._refusal
        whole = type(self._responses[0])()
        for one in self._responses:
            usage, timing = _sum(whole, one), _longest(whole, one)
            whole.MergeFrom(one)
            whole.usage.CopyFrom(usage)  # type: ignore[attr-defined]  # every answer has them
            whole.timing.CopyFrom(timing)  # type: ignore[attr-defined]
        results = _results_of(whole)
        del results[:]
        results.extend(self._answers[place] for place in self.places)
        return whole

    def told(self, found: FoundT) -> FoundT:
        """Return what `response` came to; if inputs were refused, raise that, with this."""
        if self._refusal is None:
            return found
        self._refusal.others = dict(zip(self.places, found.results, strict=True))
        raise self._refusal

    def _note(self, error: TokenweirClientError) -> None:
        """Remember what is refused, with what was before."""
        assert isinstance(error, InvalidArgument)
        if self._refusal is None:
            self._refusal = error
        else:
            self._refusal.args = (f"{self._refusal.args[0]}; {error.args[0]}",)
            self._refusal.violations += error.violations

    def _place(self, field: str) -> int | None:
        """Return the place of the input that a field is of; None: it is of none."""
        found = re.match(rf"{self._field}\[(\d+)\]", field)
        return None if found is None else self._calls[0][int(found[1])]

    def _renumbered(self, text: str) -> str:
        def renumbered(found: re.Match[str]) -> str:
            return f"{self._field}[{self._calls[0][int(found[1])]}]"

        return re.sub(rf"\b{self._field}\[(\d+)\]", renumbered, text)


def _divided(inputs: Sequence[Message], most_bytes: int) -> list[list[int]]:
    """Return the places of the inputs of each call, at least one."""
    calls: list[list[int]] = [[]]
    num_bytes = 0
    for place, one in enumerate(inputs):
        size = one.ByteSize() + 8  # with what stands before it
        if calls[-1] and (len(calls[-1]) == _MOST_INPUTS or num_bytes + size > most_bytes):
            calls.append([])
            num_bytes = 0
        calls[-1].append(place)
        num_bytes += size
    return calls  # no inputs make one call, which is refused


def _results_of(response: Any) -> Any:
    names = response.DESCRIPTOR.fields_by_name
    return next(getattr(response, name) for name in _RESULTS if name in names)


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
