"""Forced and banned tokens from a request to its answer, on an engine with a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.generation.async_engine import AsyncEngine
from engine.requests.events import FinishReason, SequenceFinished
from engine.requests.request import (
    Constraint,
    GenerationRequest,
    LogitControls,
    SamplingParams,
    ScoreRequest,
)

VOCAB, BOS, EOS = 258, 256, 257
MakeEngine = Callable[..., Awaitable[tuple[AsyncEngine, object]]]


def noise(source: list[int], tokens: list[int]) -> np.ndarray:
    """A model of letters, which ends now and then."""
    logits = np.full(VOCAB, -30.0, np.float32)
    drawn = np.random.default_rng([*source, *tokens]).normal(0, 2, 27)
    logits[97:123], logits[EOS] = drawn[:26], drawn[26]
    return logits


def letters(source: list[int], tokens: list[int]) -> np.ndarray:
    """A model that likes a best, then b, and so on, whatever was written."""
    logits = np.full(VOCAB, -30.0, np.float32)
    logits[97:123] = np.linspace(2, -2, 26)
    return logits


async def ended(engine: AsyncEngine, **params) -> list[SequenceFinished]:
    prompt, prefix = params.pop("prompt", "say>"), params.pop("target_prefix", ())
    asked = GenerationRequest("r-1", prompt, SamplingParams(**params), target_prefix=prefix)
    events = [event async for event in engine.generate(asked)]
    found = [event for event in events if isinstance(event, SequenceFinished)]
    return sorted(found, key=lambda event: event.index)


STRATEGIES = [
    {},
    {"strategy": "sampling", "seed": 3, "num_outputs": 3},
    {"strategy": "beam", "beam_width": 3, "num_outputs": 3},
]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_every_output_begins_and_ends_as_it_must(make_engine: MakeEngine, strategy) -> None:
    engine, _ = await make_engine(letters)

    found = await ended(
        engine, forced_begin=(BOS, ord("z")), forced_end=EOS, max_new_tokens=5, **strategy
    )

    assert len(found) == strategy.get("num_outputs", 1)
    assert all(one.token_ids[:2] == (BOS, ord("z")) for one in found)
    assert all(one.token_ids[4:] == (EOS,) for one in found)
    assert all(one.reason is FinishReason.LENGTH for one in found)
    assert all(len(one.text) == 3 and one.text[0] == "z" for one in found)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_constraint_holds_behind_the_forced_beginning(
    make_engine: MakeEngine, strategy
) -> None:
    engine, _ = await make_engine(noise)

    found = await ended(
        engine,
        forced_begin=(BOS, ord("q")),
        constraint=Constraint("regex", ("q[0-9]{2}",)),
        **strategy,
    )

    assert all(one.token_ids[:2] == (BOS, ord("q")) for one in found)
    assert all(one.text[0] == "q" and one.text[1:].isdigit() for one in found)
    assert all(one.reason is FinishReason.EOS for one in found)


async def test_a_constraint_that_cannot_begin_as_forced_is_refused(
    make_engine: MakeEngine,
) -> None:
    engine, _ = await make_engine(noise)

    with pytest.raises(InvalidRequest, match="token 1 of what the output begins with"):
        await ended(
            engine, forced_begin=(BOS, ord("q")), constraint=Constraint("regex", ("[0-9]",))
        )


@pytest.mark.parametrize(
    ("prefix", "beginning"),
    [
        ("hi", (BOS, *b"hi")),
        ((BOS, *b"hi"), (BOS, *b"hi")),
        (tuple(b"hi"), tuple(b"hi")),
        ("</s>hi", (EOS, *b"hi")),
    ],  # such as another language
)
async def test_a_prefix_takes_the_place_of_the_forced_beginning_and_as_text_stands_behind_it(
    make_engine: MakeEngine, prefix, beginning
) -> None:
    engine, _ = await make_engine(letters, max_source_len=8)

    (found,) = await ended(
        engine, target_prefix=prefix, forced_begin=(BOS,), max_new_tokens=2, prompt="s"
    )

    assert found.token_ids == (*beginning, *b"aa")
    assert found.text == "hiaa"


async def test_a_prefix_that_has_no_room_behind_the_forced_beginning_is_refused(
    make_engine: MakeEngine,
) -> None:
    engine, _ = await make_engine(letters, max_source_len=8, max_len=8)

    assert await ended(engine, target_prefix="x" * 5, forced_begin=(BOS,), prompt="s")
    with pytest.raises(InvalidRequest, match="7 tokens are more than the 6 that fit"):
        await ended(engine, target_prefix="x" * 6, forced_begin=(BOS,), prompt="s")


async def test_the_forced_beginning_of_a_scored_text_has_no_score(make_engine: MakeEngine) -> None:
    engine, _ = await make_engine(noise, max_source_len=8)

    text = await engine.score(ScoreRequest("r", "s", "hi", forced_begin=(BOS,)))
    ids = await engine.score(ScoreRequest("r", "s", (BOS, *b"hi"), forced_begin=(BOS,)))

    assert [position.chosen.token_id for position in text.positions] == [*b"hi"]
    assert [position.chosen.token_id for position in ids.positions] == [BOS, *b"hi"]
    assert text.positions == ids.positions[1:]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_runs_of_tokens_are_kept_out_of_every_output(
    make_engine: MakeEngine, strategy
) -> None:
    engine, _ = await make_engine(letters)
    controls = LogitControls(
        banned_tokens=(ord("c"),),
        banned_sequences=(tuple(b"aa"), tuple(b"abb"), tuple(b"abab")),
        begin_banned_tokens=tuple(b"bz"),
    )

    found = await ended(engine, controls=controls, max_new_tokens=12, **strategy)

    texts = [one.text for one in found]
    assert not any(word in text for text in texts for word in ("c", "aa", "abb", "abab"))
    assert not any(text[0] in "bz" for text in texts)
    assert any("a" in text and "b" in text for text in texts)


async def test_runs_of_the_source_are_kept_out(make_engine: MakeEngine) -> None:
    engine, _ = await make_engine(letters, max_source_len=8)
    controls = LogitControls(encoder_no_repeat_ngram=2)

    (found,) = await ended(engine, prompt="aabac", controls=controls, max_new_tokens=6)

    assert found.text == "adadad"


async def test_runs_of_a_source_of_other_tokens_are_refused(make_engine: MakeEngine) -> None:
    engine, _ = await make_engine(letters, max_source_len=8, source_vocab_size=300)

    with pytest.raises(InvalidRequest) as refusal:
        await ended(engine, prompt="ab", controls=LogitControls(encoder_no_repeat_ngram=2))

    (violation,) = refusal.value.violations
    assert violation.field == "decoding.controls.encoder_no_repeat_ngram"


@pytest.mark.parametrize("source", [None, 16])
async def test_rules_hold_whatever_runs_beside_and_when_requests_have_to_wait_again(
    make_engine: MakeEngine, source: int | None
) -> None:
    shape = {} if source is None else {"max_source_len": source}
    few = EngineConfig(max_num_seqs=4, max_num_batched_tokens=8, prefill_chunk_size=4)
    engine, _ = await make_engine(noise, config=few, **shape)
    controls = LogitControls(
        banned_sequences=tuple((a, b) for a in range(97, 123) for b in range(97, a)),
        begin_banned_tokens=tuple(range(97, 110)),
    )
    asked = [
        {"prompt": prompt, "forced_begin": begin, "controls": one, "max_new_tokens": 12, **strategy}
        for prompt in ("abcab", "abcabd")
        for begin in ((), (BOS, ord("n")))
        for one in (controls, LogitControls())
        for strategy in STRATEGIES
    ]

    alone = [await ended(engine, **one) for one in asked]
    together = await asyncio.gather(*(ended(engine, **one) for one in asked))

    assert together == alone
    assert any(one.reason is FinishReason.EOS for found in alone for one in found)
