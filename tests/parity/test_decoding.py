"""Every way of decoding, all in one running batch, gives what plain eager loops give."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.factory import load_engine
from engine.package import load_package
from engine.request import (
    Constraint,
    FinishReason,
    GenerationRequest,
    LogitControls,
    PositionLogprobs,
    RequestFinished,
    SamplingParams,
    Score,
    ScoreRequest,
    SequenceFinished,
)
from tests.parity.conftest import EOS, VOCAB_SIZE, Exported
from tests.parity.eager import Eager, beam_search, greedy_search

TOLERANCE = 1e-4
STOPS = tuple(range(20, 32))  # so many that some come early
CHOICES = ("yes", "no", "maybe", "never")
CONTROLS = [
    LogitControls(repetition_penalty=1.4),
    LogitControls(no_repeat_ngram=1),
    LogitControls(no_repeat_ngram=2),
    LogitControls(logit_bias=((5, 1.5), (9, -4.0), (40, 0.8))),
    LogitControls(banned_tokens=tuple(range(3, 40))),
    LogitControls(frequency_penalty=0.4, presence_penalty=0.3),
    LogitControls(0.7, -0.3, 0.2, 3, ((7, 1.0),), (8, 11)),
]


class Asked(NamedTuple):
    """A request; `target` is a prefix of the output, or what is to be scored."""

    prompt: tuple[int, ...]
    params: SamplingParams | None  # None: a score
    target: tuple[int, ...] = ()


class Answer(NamedTuple):
    """What came back."""

    sequences: list[SequenceFinished]
    end: RequestFinished | Score


Requests = dict[str, list[Asked]]
Answers = dict[str, list[tuple[Asked, Answer]]]


class World(NamedTuple):
    """A model and what its engine answered under load."""

    eager: Eager
    answers: Answers
    text_of: Callable[[tuple[int, ...]], str]


class Prompts:
    """Draws prompts and targets."""

    def __init__(self, family: str) -> None:
        self._rng = np.random.default_rng(3)
        self.longest = 20 if family == "encoder-decoder" else 22

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(3, VOCAB_SIZE, count).tolist())

    def any(self) -> tuple[int, ...]:
        return self.ids(int(self._rng.integers(1, self.longest + 1)))


def requests(family: str) -> Requests:
    drawn = Prompts(family)
    return {
        "beam": [Asked(drawn.any(), params) for params in beams()],
        "beam with prefix": [
            Asked(drawn.any(), params, drawn.ids(1 + i)) for i, params in enumerate(beams()[3:6])
        ],
        "greedy": [Asked(drawn.any(), params) for params in greedy()],
        "greedy with prefix": [
            Asked(drawn.any(), SamplingParams(max_new_tokens=6, prompt_logprobs=1), drawn.ids(n))
            for n in (1, 2, 4, 5, 8)
        ],
        "controlled": [Asked(drawn.any(), SamplingParams(controls=c)) for c in CONTROLS],
        "sampling": [Asked(drawn.any(), params) for params in samplings()],
        "best_of": [Asked(tuple(range(9, 16)), params) for params in best_ofs()],
        "logprobs": [
            Asked(
                drawn.ids(length),
                SamplingParams(logprobs=3, prompt_logprobs=2, max_new_tokens=4),
                drawn.ids(length % 4),
            )
            for length in range(1, 19)
        ],
        "score": [Asked(drawn.any(), None, drawn.ids(n)) for n in (1, 2, 4, 5, 8, 9, 12, 13)],
        "constraint": [Asked(drawn.ids(9), params) for params in constrained()],
    }


def beams() -> list[SamplingParams]:
    return [
        SamplingParams(
            "beam",
            beam_width=width,
            length_penalty=alpha,
            early_stop=i % 3 != 0,
            num_outputs=min(width, (1, 2, 5)[i % 3]),
            max_new_tokens=(5, 9, None)[i % 3],
            min_new_tokens=3 if i % 4 == 1 else 0,
            stop_token_ids=STOPS if i % 2 else (),
            ignore_eos=i % 5 == 4,
            logprobs=1 if i % 2 else None,
        )
        for i, (width, alpha) in enumerate(product((1, 2, 4, 5, 16), (0.0, 0.6)))
    ]


def greedy() -> list[SamplingParams]:
    return [
        SamplingParams(),
        SamplingParams(max_new_tokens=5),
        SamplingParams(stop_token_ids=STOPS),
        SamplingParams(stop_token_ids=STOPS, include_stop=True),
        SamplingParams(stop_token_ids=STOPS, min_new_tokens=7, max_new_tokens=9),
        SamplingParams(controls=LogitControls(logit_bias=((EOS, 6.0),))),
        SamplingParams(controls=LogitControls(logit_bias=((EOS, 6.0),)), ignore_eos=True),
        SamplingParams(controls=LogitControls(logit_bias=((EOS, 6.0),)), min_new_tokens=4),
    ]


def samplings() -> list[SamplingParams]:
    options: list[dict[str, float]] = [
        {},
        {"temperature": 0.5, "top_k": 4},
        {"top_k": 1},
        {"top_p": 0.4},
        {"min_p": 0.5, "temperature": 2.0},
        {"typical_p": 0.5},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.7, "min_p": 0.1, "typical_p": 0.9},
    ]
    return [
        SamplingParams("sampling", seed=seed, num_outputs=3, controls=controls, **option)
        for seed, (option, controls) in enumerate(product(options, (LogitControls(), CONTROLS[-1])))
    ]


def best_ofs() -> list[SamplingParams]:
    """In pairs: the best two of five, and all five."""
    return [
        SamplingParams("sampling", seed=seed, max_new_tokens=8, stop_token_ids=STOPS, **counts)
        for seed in range(4)
        for counts in ({"num_outputs": 2, "best_of": 5}, {"num_outputs": 5})
    ]


def constrained() -> list[SamplingParams]:
    found = []
    for constraint in (Constraint("choice", CHOICES), Constraint("regex", ("[0-9]{2}(:[a-f])?",))):
        found += [
            SamplingParams(constraint=constraint),
            SamplingParams("sampling", seed=1, num_outputs=3, constraint=constraint),
            SamplingParams(
                "beam", beam_width=8, num_outputs=4, length_penalty=0.0, constraint=constraint
            ),
        ]
    return found


async def ask(engine: AsyncEngine, name: str, asked: Asked) -> Answer:
    if asked.params is None:
        return Answer([], await engine.score(ScoreRequest(name, asked.prompt, asked.target, 2)))
    request = GenerationRequest(name, asked.prompt, asked.params, target_prefix=asked.target)
    events = [event async for event in engine.generate(request)]
    found = [event for event in events if isinstance(event, SequenceFinished)]
    assert isinstance(events[-1], RequestFinished)
    return Answer(sorted(found, key=lambda sequence: sequence.index), events[-1])


async def answer_all(engine: AsyncEngine, wanted: Requests) -> Answers:
    """Ask everything at once, in an order that mixes the kinds."""
    flat = [(kind, asked) for kind, group in wanted.items() for asked in group]
    order = np.random.default_rng(0).permutation(len(flat))
    await engine.start()
    try:
        found = await asyncio.gather(*(ask(engine, flat[i][0], flat[i][1]) for i in order))
    finally:
        await engine.stop()
    answers: Answers = {kind: [] for kind in wanted}
    for i, answer in sorted(zip(order.tolist(), found, strict=True), key=lambda pair: pair[0]):
        answers[flat[i][0]].append((flat[i][1], answer))
    return answers


@pytest.fixture(
    scope="module",
    params=product(["gpt", "encoder-decoder"], [8, 18]),
    ids=lambda param: f"{param[0]}-{param[1]}-slots",
)
def world(request: pytest.FixtureRequest, exported: Callable[[str], Exported]) -> World:
    """With 8 slots all wait for each other; only 18 hold a search with 16 beams."""
    family, num_slots = request.param
    checkpoint, path = exported(family)
    config = EngineConfig(
        max_num_seqs=num_slots, max_num_batched_tokens=24, prefill_chunk_size=4, num_threads=1
    )
    engine = load_engine(load_package(path), config)
    assert isinstance(engine, AsyncEngine)
    wanted = {
        kind: [a for a in group if a.params is None or a.params.num_sequences <= num_slots]
        for kind, group in requests(family).items()
    }
    answers = asyncio.run(answer_all(engine, wanted))
    return World(Eager(checkpoint.model), answers, engine._tokenizer.decode)


def generated(asked: Asked, sequence: SequenceFinished) -> tuple[int, ...]:
    assert sequence.token_ids[: len(asked.target)] == asked.target
    return sequence.token_ids[len(asked.target) :]


@pytest.mark.parametrize("kind", ["beam", "beam with prefix"])
def test_beams_and_scores_are_those_of_a_plain_search(world: World, kind: str) -> None:
    for asked, answer in world.answers[kind]:
        assert asked.params is not None
        expected = beam_search(world.eager, asked.prompt, asked.params, asked.target)

        assert len(answer.sequences) == asked.params.num_outputs
        for sequence, best in zip(answer.sequences, expected, strict=True):
            assert generated(asked, sequence) == best.tokens, asked
            assert sequence.score == pytest.approx(best.score, abs=TOLERANCE)
            assert sequence.sum_logprob == pytest.approx(best.sum_logprob, abs=TOLERANCE)
            assert sequence.reason == best.reason


@pytest.mark.parametrize("kind", ["greedy", "greedy with prefix", "controlled"])
def test_greedy_tokens_are_those_of_a_plain_loop(world: World, kind: str) -> None:
    for asked, answer in world.answers[kind]:
        assert asked.params is not None
        controls = asked.params.controls
        tokens, reason = greedy_search(
            world.eager,
            asked.prompt,
            asked.params,
            asked.target,
            lambda logits, tokens, given, c=controls: controlled(logits, tokens, given, c),
        )

        (sequence,) = answer.sequences
        assert (generated(asked, sequence), sequence.reason) == (tokens, reason), asked
        is_shown = reason in (FinishReason.LENGTH, FinishReason.CONTEXT_FULL)
        is_shown |= reason is FinishReason.STOP and asked.params.include_stop
        shown = sequence.token_ids[: None if is_shown else -1]
        assert sequence.text == world.text_of(shown)


def controlled(logits: Tensor, tokens: list[int], given: int, c: LogitControls) -> Tensor:
    """Change logits as transformers does; it has no frequency and presence penalties."""
    seen, row = torch.tensor([tokens]), logits[None]
    if c.repetition_penalty != 1:
        row = hf.RepetitionPenaltyLogitsProcessor(c.repetition_penalty)(seen, row)
    for token in tokens[given:]:
        row[0, token] -= c.frequency_penalty
    for token in set(tokens[given:]):
        row[0, token] -= c.presence_penalty
    if c.no_repeat_ngram:
        row = hf.NoRepeatNGramLogitsProcessor(c.no_repeat_ngram)(seen, row)
    if c.logit_bias:
        biases = [[[token], bias] for token, bias in c.logit_bias]
        row = hf.SequenceBiasLogitsProcessor(biases)(seen, row)
    if c.banned_tokens:
        row = hf.NoBadWordsLogitsProcessor([[token] for token in c.banned_tokens])(seen, row)
    return row[0]


def test_sampled_tokens_are_among_those_that_transformers_would_draw_from(world: World) -> None:
    for asked, answer in world.answers["sampling"]:
        assert asked.params is not None
        assert len({sequence.token_ids for sequence in answer.sequences}) == (
            1 if asked.params.top_k == 1 else 3
        )
        for sequence in answer.sequences:
            tokens = world.eager.given(asked.prompt)
            given = len(tokens)
            for token in sequence.token_ids:
                logits = world.eager.logits(asked.prompt, [tokens])[0, -1].clone()
                row = controlled(logits, tokens, given, asked.params.controls)[None]
                for truncate in truncations(asked.params):
                    row = truncate(torch.tensor([tokens]), row)
                assert row[0, token] > -torch.inf, (asked, tokens, token)
                tokens.append(token)


def truncations(params: SamplingParams) -> Iterator[hf.LogitsProcessor]:
    yield hf.TemperatureLogitsWarper(params.temperature)
    if params.top_k:
        yield hf.TopKLogitsWarper(params.top_k)
    if params.top_p < 1:
        yield hf.TopPLogitsWarper(params.top_p)
    if params.min_p > 0:
        yield hf.MinPLogitsWarper(params.min_p)
    if params.typical_p < 1:
        yield hf.TypicalLogitsWarper(params.typical_p)


def test_best_of_returns_the_samples_with_the_highest_mean_logprob(world: World) -> None:
    pairs = world.answers["best_of"]
    for (_, best), (_, every) in zip(pairs[::2], pairs[1::2], strict=True):
        means = [(s.sum_logprob / len(s.token_ids), s.token_ids) for s in every.sequences]

        expected = sorted(means, key=lambda mean: -mean[0])[:2]
        assert [(s.score, s.token_ids) for s in best.sequences] == expected


@pytest.mark.parametrize("kind", ["logprobs", "greedy with prefix", "beam"])
def test_logprobs_are_those_of_the_eager_model(world: World, kind: str) -> None:
    for asked, answer in world.answers[kind]:
        assert asked.params is not None and isinstance(answer.end, RequestFinished)
        given = world.eager.given(asked.prompt, asked.target)
        if asked.params.prompt_logprobs is not None:
            logprobs = world.eager.logprobs(asked.prompt, [given])[0]
            found = answer.end.prompt_logprobs
            assert_positions(found, given[1:], logprobs, asked.params.prompt_logprobs)
        for sequence in answer.sequences:
            tokens = generated(asked, sequence)
            logprobs = world.eager.logprobs(asked.prompt, [[*given, *tokens]])[0, len(given) - 1 :]
            if asked.params.logprobs is not None:
                assert_positions(sequence.logprobs, tokens, logprobs, asked.params.logprobs)
            total = float(logprobs[range(len(tokens)), tokens].sum())
            assert sequence.sum_logprob == pytest.approx(total, abs=TOLERANCE)


def test_scores_are_the_logprobs_of_the_eager_model(world: World) -> None:
    for asked, answer in world.answers["score"]:
        assert isinstance(answer.end, Score)
        given = world.eager.given(asked.prompt)
        row = [*given, *asked.target]
        logprobs = world.eager.logprobs(asked.prompt, [row])[0, len(given) - 1 :]

        assert_positions(answer.end.positions, asked.target, logprobs, 2)
        total = float(logprobs[range(len(asked.target)), asked.target].sum())
        assert answer.end.sum_logprob == pytest.approx(total, abs=TOLERANCE)


def assert_positions(
    found: tuple[PositionLogprobs, ...],
    tokens: list[int] | tuple[int, ...],
    logprobs: Tensor,  # [T or more, V]
    num_top: int,
) -> None:
    assert [position.chosen.token_id for position in found] == list(tokens)
    for position, row in zip(found, logprobs, strict=False):
        assert [one.rank for one in position.top] == list(range(1, num_top + 1))
        best = row.topk(num_top).values.tolist() if num_top else []
        assert [one.logprob for one in position.top] == pytest.approx(best, abs=TOLERANCE)
        for one in (position.chosen, *position.top):
            logprob = float(row[one.token_id])
            assert one.logprob == pytest.approx(logprob, abs=TOLERANCE)
            fewest = 1 + int((row > logprob + TOLERANCE).sum())
            most = 1 + int((row > logprob - TOLERANCE).sum())
            assert fewest <= one.rank <= most


def test_the_score_of_an_answer_is_the_logprob_that_came_with_it(
    exported: Callable[[str], Exported],
) -> None:
    for family in ("gpt", "encoder-decoder"):
        config = EngineConfig(
            max_num_seqs=3, max_num_batched_tokens=12, prefill_chunk_size=4, num_threads=1
        )
        engine = load_engine(load_package(exported(family).package), config)
        assert isinstance(engine, AsyncEngine)
        prompts = [Prompts(family).ids(length) for length in (1, 4, 5, 11)]

        generating = [Asked(prompt, SamplingParams(max_new_tokens=9)) for prompt in prompts]
        answers = asyncio.run(answer_and_score(engine, generating))

        for answer, score in answers:
            (sequence,) = answer.sequences
            assert score.sum_logprob == pytest.approx(sequence.sum_logprob, abs=TOLERANCE)


async def answer_and_score(
    engine: AsyncEngine, generating: list[Asked]
) -> list[tuple[Answer, Score]]:
    await engine.start()

    async def both(asked: Asked) -> tuple[Answer, Score]:
        answer = await ask(engine, "generate", asked)
        target = answer.sequences[0].token_ids
        return answer, await engine.score(ScoreRequest("score", asked.prompt, target))

    try:
        return await asyncio.gather(*map(both, generating))
    finally:
        await engine.stop()


def test_constrained_texts_match_and_beams_find_the_likeliest(world: World) -> None:
    for asked, answer in world.answers["constraint"]:
        assert asked.params is not None and asked.params.constraint is not None
        kind, values = asked.params.constraint.kind, asked.params.constraint.values
        for sequence in answer.sequences:
            assert sequence.reason is FinishReason.EOS
            if kind == "choice":
                assert sequence.text in CHOICES
            else:
                assert re.fullmatch(values[0], sequence.text)
        if kind == "choice" and asked.params.strategy == "beam":
            scores = {sequence.text: sequence.score for sequence in answer.sequences}
            assert scores == pytest.approx(choice_scores(world, asked), abs=TOLERANCE)
            assert list(scores) == sorted(scores, key=lambda text: -scores[text])


def choice_scores(world: World, asked: Asked) -> dict[str, float]:
    letters = {world.text_of((token,)): token for token in range(3, VOCAB_SIZE - 1)}
    given, found = world.eager.given(asked.prompt), {}
    for choice in CHOICES:
        tokens = [*(letters[letter] for letter in choice), EOS]
        logprobs = world.eager.logprobs(asked.prompt, [[*given, *tokens]])[0, len(given) - 1 :]
        found[choice] = float(logprobs[range(len(tokens)), tokens].sum())
    return found
