"""Deltas are gathered to the size asked for, and further when their reader is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.errors import EngineFailure
from engine.requests.events import (
    Admitted,
    FinishReason,
    GenerationEvent,
    PositionLogprobs,
    RequestFinished,
    SequenceFinished,
    TextDelta,
    TokenLogprob,
    Usage,
)
from server.worker.deltas import gathered
from tests.server.fakes import TIMING

ADMITTED = Admitted("r")
END = RequestFinished("r", Usage(1, 1), TIMING, seed=0)


def _token(text: str, index: int = 0) -> TextDelta:
    return TextDelta(index, text, (ord(text[0]),))


def _end(index: int = 0) -> SequenceFinished:
    return SequenceFinished(index, FinishReason.EOS, "", (), None, 0.0)


async def _paced(*events: GenerationEvent) -> AsyncIterator[GenerationEvent]:
    """Yield one event at a time, as an engine that is slower than its reader."""
    for event in events:
        yield event
        await asyncio.sleep(0.001)


async def _at_once(*events: GenerationEvent) -> AsyncIterator[GenerationEvent]:
    for event in events:
        yield event


async def test_a_fast_reader_gets_every_token_on_its_own() -> None:
    events = [ADMITTED, _token("a"), _token("b"), _end(), END]

    assert [e async for e in gathered(_paced(*events), 1)] == events


async def test_tokens_are_gathered_per_sequence_and_the_rest_comes_before_the_end() -> None:
    events = [ADMITTED, _token("a"), _token("x", 1), _token("b"), _token("c"), _end(), _end(1), END]

    got = [e async for e in gathered(_paced(*events), 2)]

    assert got == [
        ADMITTED,
        TextDelta(0, "ab", (97, 98)),
        TextDelta(0, "c", (99,)),
        _end(),
        TextDelta(1, "x", (120,)),
        _end(1),
        END,
    ]


async def test_log_probabilities_are_gathered_with_their_tokens() -> None:
    first, second = (PositionLogprobs(TokenLogprob(i, -1.0, 1)) for i in (97, 98))
    events = [
        ADMITTED,
        TextDelta(0, "a", (97,), (first,)),
        TextDelta(0, "b", (98,), (second,)),
        _end(),
        END,
    ]

    got = [e async for e in gathered(_paced(*events), 2)]

    assert got == [ADMITTED, TextDelta(0, "ab", (97, 98), (first, second)), _end(), END]


async def test_a_slow_reader_gets_longer_deltas() -> None:
    tokens = [_token("a") for _ in range(1000)]
    source = _at_once(ADMITTED, *tokens, _end(), END)

    got = []
    async for event in gathered(source, 1):
        got.append(event)
        await asyncio.sleep(0.001)

    deltas = [event for event in got if isinstance(event, TextDelta)]
    assert "".join(delta.text for delta in deltas) == "a" * 1000
    assert len(deltas) < 10
    assert got[0] == ADMITTED
    assert got[-2:] == [_end(), END]


async def test_an_error_comes_after_what_was_made_before_it() -> None:
    async def failing() -> AsyncIterator[GenerationEvent]:
        yield ADMITTED
        yield _token("a")
        raise EngineFailure("a step failed")

    got = []
    with pytest.raises(EngineFailure):
        async for event in gathered(failing(), 1):
            got.append(event)

    assert got == [ADMITTED, _token("a")]


async def test_tokens_too_few_for_a_message_come_before_the_error() -> None:
    async def failing() -> AsyncIterator[GenerationEvent]:
        yield ADMITTED
        yield _token("a")
        yield _token("x", 1)
        yield _token("b")
        raise EngineFailure("a step failed")

    got = []
    with pytest.raises(EngineFailure):
        async for event in gathered(failing(), 8):
            got.append(event)

    assert got == [ADMITTED, TextDelta(0, "ab", (97, 98)), _token("x", 1)]


async def test_closing_closes_the_engines_generator() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[GenerationEvent]:
        try:
            yield ADMITTED
            await asyncio.Event().wait()
        finally:
            closed.set()

    events = gathered(endless(), 1)
    assert await anext(events) == ADMITTED
    await events.aclose()

    assert closed.is_set()


async def test_what_comes_soon_after_a_message_waits_for_what_comes_with_it() -> None:
    tokens = [_token("a") for _ in range(100)]

    got = [e async for e in gathered(_paced(ADMITTED, *tokens, _end(), END), 1, pause=0.05)]

    deltas = [event for event in got if isinstance(event, TextDelta)]
    assert "".join(delta.text for delta in deltas) == "a" * 100
    assert len(deltas) < 20
    assert got[0] == ADMITTED
    assert got[-2:] == [_end(), END]


async def test_the_end_does_not_wait_for_the_pause() -> None:
    async def read() -> list[GenerationEvent]:
        source = _paced(ADMITTED, _token("a"), _end(), END)
        return [event async for event in gathered(source, 1, pause=3600)]

    assert len(await asyncio.wait_for(read(), 10)) == 4
