"""Controls and constraints from a request to its text, on an engine with a scripted model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.generation.async_engine import AsyncEngine
from engine.requests.events import FinishReason, SequenceFinished
from engine.requests.request import Constraint, GenerationRequest, LogitControls, SamplingParams

VOCAB, EOS = 258, 257
MakeEngine = Callable[..., Awaitable[tuple[AsyncEngine, object]]]
DIGITS = Constraint("regex", ("[0-9]{3}",))


def noise(source: list[int], tokens: list[int]) -> np.ndarray:
    """A model that wants anything but digits."""
    logits = np.random.default_rng(tokens).normal(0, 2, VOCAB)
    logits[ord("0") : ord("9") + 1] -= 50
    return logits.astype(np.float32)


async def ended(engine: AsyncEngine, **params) -> list[SequenceFinished]:
    prompt = params.pop("prompt", "say>")
    asked = GenerationRequest("r-1", prompt, SamplingParams(**params))
    events = [event async for event in engine.generate(asked)]
    found = [event for event in events if isinstance(event, SequenceFinished)]
    return sorted(found, key=lambda event: event.index)


@pytest.mark.parametrize("strategy", ["greedy", "sampling"])
async def test_output_matches_the_constraint_and_then_ends(
    make_engine: MakeEngine, strategy: str
) -> None:
    engine, _ = await make_engine(noise)

    (found,) = await ended(engine, strategy=strategy, constraint=DIGITS)

    assert re.fullmatch("[0-9]{3}", found.text)
    assert found.reason is FinishReason.EOS


async def test_every_output_of_a_request_follows_the_constraint_by_itself(
    make_engine: MakeEngine,
) -> None:
    engine, _ = await make_engine(noise)

    found = await ended(engine, strategy="sampling", num_outputs=4, constraint=DIGITS, seed=3)

    assert all(re.fullmatch("[0-9]{3}", one.text) for one in found)
    assert len({one.text for one in found}) > 1


async def test_constrained_requests_run_beside_free_ones(make_engine: MakeEngine) -> None:
    engine, _ = await make_engine(noise)
    schema = json.dumps({"enum": ["left", "right"]})
    asked = [
        {"constraint": Constraint("json_schema", (schema,))},
        {"max_new_tokens": 9, "ignore_eos": True},
        {"constraint": DIGITS},
    ]

    alone = [await ended(engine, **one) for one in asked]
    together = await asyncio.gather(*(ended(engine, **one) for one in asked))

    assert alone == together
    assert json.loads(alone[0][0].text) in ("left", "right")


async def test_a_constraint_that_must_end_does_before_min_new_tokens(
    make_engine: MakeEngine,
) -> None:
    engine, _ = await make_engine(noise)

    (found,) = await ended(engine, constraint=DIGITS, min_new_tokens=10)

    assert len(found.text) == 3 and found.reason is FinishReason.EOS


async def test_a_wrong_constraint_is_refused_before_anything_is_queued(
    make_engine: MakeEngine,
) -> None:
    engine, runner = await make_engine(noise)

    with pytest.raises(InvalidRequest, match="unclosed group"):
        await ended(engine, constraint=Constraint("regex", ("(",)))

    assert runner.batches == []


async def test_a_constrained_output_cannot_go_on_behind_its_end(make_engine: MakeEngine) -> None:
    engine, _ = await make_engine(noise)

    with pytest.raises(InvalidRequest, match="stopping.ignore_eos"):
        await ended(engine, constraint=DIGITS, ignore_eos=True, max_new_tokens=9)


async def test_a_constraint_that_cannot_be_followed_any_further_ends_its_request_only(
    make_engine: MakeEngine,
) -> None:
    engine, _ = await make_engine(noise)
    rules = [f'r{i}: r{i + 1} | "b" r{i + 1}' for i in range(2500)]
    grammar = "\n".join(['start: "b" r0', *rules, 'r2500: "a"'])

    failed, free = await asyncio.gather(
        ended(engine, constraint=Constraint("grammar", (grammar,))),
        ended(engine, max_new_tokens=9, ignore_eos=True),
        return_exceptions=True,
    )

    assert isinstance(failed, InvalidRequest)
    assert [v.field for v in failed.violations] == ["decoding.constraint.grammar"]
    assert "too complex" in str(failed)
    assert len(free[0].token_ids) == 9


async def test_controls_see_prompt_and_output_of_their_own_sequence(
    make_engine: MakeEngine,
) -> None:
    def likes_low_letters(source: list[int], tokens: list[int]) -> np.ndarray:
        logits = np.zeros(VOCAB, np.float32)
        logits[97:123] = np.linspace(2, 1, 26)
        return logits

    engine, _ = await make_engine(likes_low_letters)
    asked = {
        "plain": LogitControls(),
        "repetition": LogitControls(repetition_penalty=4.0),
        "presence": LogitControls(presence_penalty=2.0),
        "bias": LogitControls(logit_bias=((ord("z"), 5.0),)),
        "banned": LogitControls(banned_tokens=(ord("a"), ord("b"))),
        "ngram": LogitControls(no_repeat_ngram=2),
    }

    found = await asyncio.gather(
        *(ended(engine, prompt="a>", max_new_tokens=4, controls=one) for one in asked.values())
    )

    assert {name: one[0].text for name, one in zip(asked, found, strict=True)} == {
        "plain": "aaaa",
        "repetition": "bcde",
        "presence": "abcd",
        "bias": "zzzz",
        "banned": "cccc",
        "ngram": "aaba",
    }


async def test_every_hypothesis_of_a_beam_search_follows_the_constraint(
    make_engine: MakeEngine,
) -> None:
    engine, _ = await make_engine(noise)
    date = "[0-9]{4}-[0-9]{2}"

    found = await ended(
        engine,
        strategy="beam",
        beam_width=4,
        num_outputs=4,
        constraint=Constraint("regex", (date,)),
    )

    assert len({one.text for one in found}) == 4
    assert all(re.fullmatch(date, one.text) for one in found)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)


async def test_a_beam_search_finds_no_more_than_the_constraint_allows(
    make_engine: MakeEngine,
) -> None:
    engine, _ = await make_engine(noise)

    found = await ended(
        engine,
        strategy="beam",
        beam_width=4,
        num_outputs=3,
        constraint=Constraint("choice", ("12", "345")),
    )

    assert {one.text for one in found} == {"12", "345"}


async def test_a_given_prefix_is_part_of_the_constrained_text(make_engine: MakeEngine) -> None:
    engine, _ = await make_engine(noise, max_source_len=16)
    asked = GenerationRequest(
        "r-1", "source", SamplingParams(constraint=DIGITS), target_prefix="47"
    )

    events = [event async for event in engine.generate(asked)]

    (found,) = [event for event in events if isinstance(event, SequenceFinished)]
    assert re.fullmatch("47[0-9]", found.text)


async def test_a_prefix_that_the_constraint_rules_out_is_refused(make_engine: MakeEngine) -> None:
    engine, runner = await make_engine(noise, max_source_len=16)
    asked = GenerationRequest(
        "r-1", "source", SamplingParams(constraint=DIGITS), target_prefix="4x"
    )

    with pytest.raises(InvalidRequest, match="token 1 of what the output begins with"):
        await anext(engine.generate(asked))

    assert runner.batches == []
