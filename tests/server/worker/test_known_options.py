"""Options that a worker has seen before decode as at first, and inputs are looked at each time."""

from __future__ import annotations

from typing import Any

import pytest
from tokenweir.v1 import generation_service_pb2 as pb

from engine.config import RequestLimits
from engine.errors import TokenweirError
from engine.requests.request import SamplingParams
from server.worker import known_options
from server.worker.known_options import KnownOptions
from tests.fakes.calls import generate
from tests.fakes.engines import OPTIONS, generation_package

_LIMITS = RequestLimits(max_inputs=3)


def params(known: KnownOptions, request: Any, capabilities: tuple[str, ...] = OPTIONS) -> Any:
    return known.params(request, generation_package().manifest, capabilities, _LIMITS)


def asked(text: str = "hello", **stopping: Any) -> Any:
    request = generate(text)
    request.stopping.MergeFrom(pb.Stopping(**stopping))
    return request


def error_of(known: KnownOptions, request: Any) -> tuple[type[TokenweirError], str]:
    with pytest.raises(TokenweirError) as caught:
        params(known, request)
    return caught.type, f"{caught.value}"


def test_the_same_options_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownOptions()
    first = params(known, asked("one", max_new_tokens=5))
    monkeypatch.setattr(known_options, "sampling_params", None)

    assert params(known, asked("two", max_new_tokens=5)) is first
    assert first == SamplingParams(max_new_tokens=5)


def test_other_options_and_other_capabilities_are_others() -> None:
    known = KnownOptions()
    params(known, asked(max_new_tokens=5))
    prefixed = asked(max_new_tokens=5)
    prefixed.inputs[0].prefix_text = "x"
    params(known, prefixed)

    assert params(known, asked(max_new_tokens=6)).max_new_tokens == 6
    without = tuple(name for name in OPTIONS if name != "target_prefix")
    with pytest.raises(TokenweirError, match="prefix_text: not supported"):
        params(known, prefixed, without)


def wrong_requests() -> dict[str, Any]:
    found = {what: generate("hello") for what in ("empty", "none", "many", "ids", "chat", "id")}
    found["empty"].inputs[0].ClearField("text")
    del found["none"].inputs[:]
    found["many"].inputs.extend([pb.Input(text="x")] * 3)
    found["ids"].inputs[0].tokens.ids.extend([1] * 100_000)
    found["chat"].inputs[0].chat.SetInParent()
    found["id"].request_id = "x" * 1000
    return found


@pytest.mark.parametrize("what", wrong_requests())
def test_wrong_inputs_are_refused_as_those_of_the_first_request(what: str) -> None:
    known, request = KnownOptions(), wrong_requests()[what]
    params(known, generate("hello"))

    assert error_of(known, request) == error_of(KnownOptions(), request)


def test_wrong_options_are_refused_each_time() -> None:
    known, request = KnownOptions(), asked(max_new_tokens=-1)

    assert error_of(known, request) == error_of(known, request)


def test_long_options_and_more_than_a_few_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_options, "_MAX_OPTIONS", 2)
    known = KnownOptions()
    long = asked(strings=["x" * 64] * 4)
    monkeypatch.setattr(known_options, "_MAX_BYTES", 200)

    found = [params(known, one) for one in (long, *(asked(max_new_tokens=i) for i in (1, 2, 3)))]

    assert params(known, asked(max_new_tokens=3)) is found[3]
    assert params(known, asked(max_new_tokens=1)) is not found[1]
    assert params(known, long) is not found[0]
