"""Why a sequence ends where several ends come with one token: the same with and without beams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from engine.generation.async_engine import AsyncEngine
from engine.requests.events import FinishReason, SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams

MakeEngine = Callable[..., Awaitable[tuple[AsyncEngine, object]]]
Script = Callable[[list[int], list[int]], np.ndarray]

BOTH = pytest.mark.parametrize(
    "strategy", [{}, {"strategy": "beam", "beam_width": 1}], ids=["greedy", "beam"]
)


def spell(text: bytes) -> Script:
    """Make a script that writes a text and then ends."""
    ids = [*text, 257]

    def script(source: list[int], tokens: list[int]) -> np.ndarray:
        logits = np.full(258, -30.0, np.float32)
        logits[ids[min(len(tokens) - 1, len(text))]] = 0.0
        return logits

    return script


async def end_of(engine: AsyncEngine, **params) -> tuple[FinishReason, str | int | None, str]:
    asked = GenerationRequest("r", ">", SamplingParams(**params))
    (end,) = [e async for e in engine.generate(asked) if isinstance(e, SequenceFinished)]
    return end.reason, end.matched_stop, end.text


@BOTH
@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"max_new_tokens": 3}, FinishReason.LENGTH), ({}, FinishReason.CONTEXT_FULL)],
)
@pytest.mark.parametrize("include", [False, True])
async def test_a_token_that_is_forced_at_the_limit_completes_no_stop_string(
    make_engine: MakeEngine, strategy, limit, reason, include
) -> None:
    engine, _ = await make_engine(spell(b"abcdef"), max_len=4)

    found = await end_of(
        engine,
        forced_end=ord("z"),
        stop_strings=("bz", "z"),
        include_stop=include,
        **limit,
        **strategy,
    )

    assert found == (reason, None, "abz")


@BOTH
async def test_a_stop_string_ends_a_sequence_before_a_token_is_forced(
    make_engine: MakeEngine, strategy
) -> None:
    engine, _ = await make_engine(spell(b"abcdef"))

    found = await end_of(
        engine, forced_end=ord("z"), max_new_tokens=3, stop_strings=("b",), **strategy
    )

    assert found == (FinishReason.STOP, "b", "a")


@BOTH
@pytest.mark.parametrize(
    ("include", "end"),
    [
        (False, (FinishReason.STOP, ord("b"), "a")),  # the token is not text
        (True, (FinishReason.STOP, "ab", "ab")),
    ],
)
async def test_a_stop_string_goes_before_the_stop_token_that_completes_it_if_stops_are_kept(
    make_engine: MakeEngine, strategy, include, end
) -> None:
    engine, _ = await make_engine(spell(b"abc"))

    found = await end_of(
        engine,
        stop_strings=("ab",),
        stop_token_ids=(ord("b"),),
        include_stop=include,
        **strategy,
    )

    assert found == end


@BOTH
@pytest.mark.parametrize("limit", [{}, {"max_new_tokens": 2}], ids=["eos", "length"])
async def test_what_is_left_of_a_character_at_the_end_may_complete_a_stop_string(
    make_engine: MakeEngine, strategy, limit
) -> None:
    engine, _ = await make_engine(spell(b"a\xc3"))

    found = await end_of(engine, stop_strings=("</s>", "\ufffd"), **limit, **strategy)

    assert found == (FinishReason.STOP, "\ufffd", "a")
