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

from engine.config import EngineConfig
from engine.generation.async_engine import AsyncEngine
from engine.requests.events import (
    FinishReason,
    PositionLogprobs,
    RequestFinished,
    Score,
    SequenceFinished,
)
from engine.requests.request import (
    Constraint,
    GenerationRequest,
    LogitControls,
    SamplingParams,
    ScoreRequest,
)
from engine.text.tokenizer import Tokenizer
from tests.parity.conftest import (
    CPU,
    CUDA_FP16,
    CUDA_FP32,
    EOS,
    VOCAB_SIZE,
    Exported,
    Setup,
)
from tests.parity.eager import TOLERANCE, Eager, Found, beam_search, greedy_search

MOST_TURNED = 0.25  # share of the searches in float16 that a rounding may have led elsewhere
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
    """The sequences and the end of a request."""

    sequences: list[SequenceFinished]
    end: RequestFinished | Score


Requests = dict[str, list[Asked]]
Answers = dict[str, list[tuple[Asked, Answer]]]


class World(NamedTuple):
    """A model and what its engine answered under load."""

    eager: Eager
    answers: Answers
    setup: Setup
    has_equal_bits: bool
    text_of: Callable[[tuple[int, ...]], str]


class Prompts:
    """Draws prompts and targets."""

    def __init__(self, name: str) -> None:
        self._rng = np.random.default_rng(3)
        self.longest = 20 if name == "encoder-decoder" else 22

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(3, VOCAB_SIZE, count).tolist())

    def any(self) -> tuple[int, ...]:
        return self.ids(int(self._rng.integers(1, self.longest + 1)))


def requests(name: str) -> Requests:
    drawn = Prompts(name)
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
            length_penalty_form="paper",
            beam_end="bound" if i % 3 else "limit",
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
    """Return pairs: the best two of five, and all five."""
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


QUICK = [
    ("gpt", 8, CPU),
    ("encoder-decoder", 18, CPU),
    ("llama", 8, CUDA_FP16),
    ("encoder-decoder", 8, CUDA_FP32),
]
WORLDS = list(product(["gpt", "llama", "encoder-decoder"], [8, 18], [CPU, CUDA_FP32, CUDA_FP16]))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            one,
            id=f"{one[0]}-{one[1]}-slots-{one[2].form.target}-{one[2].form.precision}",
            marks=() if one in QUICK else pytest.mark.long,
        )
        for one in WORLDS
    ],
)
def world(request: pytest.FixtureRequest, exported: Callable[..., Exported]) -> World:
    """An engine: all wait for each other in 8 slots; only 18 hold a search with 16 beams."""
    name, num_slots, setup = request.param
    checkpoint, path = exported(name, setup.form)
    config = EngineConfig(
        max_num_seqs=num_slots, max_num_batched_tokens=24, prefill_chunk_size=4, num_threads=1
    )
    engine = setup.load(path, config)
    wanted = {
        kind: [a for a in group if a.params is None or a.params.num_sequences <= num_slots]
        for kind, group in requests(name).items()
    }
    answers = asyncio.run(answer_all(engine, wanted))
    eager = Eager(checkpoint.model, setup.form.precision)
    bits = setup.has_equal_bits(name)
    return World(eager, answers, setup, bits, Tokenizer(path / "tokenizer.json").decode)


def generated(asked: Asked, sequence: SequenceFinished) -> tuple[int, ...]:
    assert sequence.token_ids[: len(asked.target)] == asked.target
    return sequence.token_ids[len(asked.target) :]


@pytest.mark.parametrize("kind", ["beam", "beam with prefix"])
def test_beams_and_scores_are_those_of_a_plain_search(world: World, kind: str) -> None:
    turned = 0
    for asked, answer in world.answers[kind]:
        assert asked.params is not None
        expected = beam_search(world.eager, asked.prompt, asked.params, asked.target)

        assert len(answer.sequences) == asked.params.num_outputs
        found = [(generated(asked, one), one.reason) for one in answer.sequences]
        if world.setup.form.precision == "fp16":
            is_same = found == [(best.tokens, best.reason) for best in expected]
            turned += not is_same
            expected = expected if is_same else [scored(world, asked, one) for one in found]
        for sequence, best in zip(answer.sequences, expected, strict=True):
            allowed = allowed_sum(world, asked, best.tokens)
            assert generated(asked, sequence) == best.tokens, asked
            assert sequence.score == pytest.approx(best.score, abs=allowed)
            assert sequence.sum_logprob == pytest.approx(best.sum_logprob, abs=allowed)
            assert sequence.reason == best.reason
    assert turned <= MOST_TURNED * len(world.answers[kind])


def scored(world: World, asked: Asked, ended: tuple[tuple[int, ...], FinishReason]) -> Found:
    """Return a sequence with the score that the eager model gives it."""
    assert asked.params is not None
    tokens, reason = ended
    given = world.eager.given(asked.prompt, asked.target)
    logprobs = world.eager.logprobs(asked.prompt, [[*given, *tokens]])[0, len(given) - 1 :]
    total = float(logprobs[range(len(tokens)), tokens].sum())
    penalty = ((5 + len(tokens)) / 6) ** asked.params.length_penalty
    return Found(total / penalty, tokens, total, reason)


def allowed_sum(world: World, asked: Asked, tokens: tuple[int, ...]) -> float:
    """Return how far the log-probability of tokens may be from the eager model's."""
    if world.setup.form.precision == "fp32":
        return TOLERANCE
    given = world.eager.given(asked.prompt, asked.target)
    return sum(world.eager.allowed(asked.prompt, [*given, *tokens])[len(given) - 1 : -1])


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
            generated(asked, answer.sequences[0]),
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
                logits = world.eager.logits(asked.prompt, [tokens])[0, -1]
                is_drawn = may_be_drawn(token, logits, 0.0, tokens, given, asked.params)
                if not is_drawn:
                    turned = world.eager.undecided(asked.prompt, tokens)
                    is_drawn = any(
                        may_be_drawn(token, logits, move, tokens, given, asked.params)
                        for move in (turned, -turned)
                    )
                assert is_drawn, (asked, tokens, token)
                tokens.append(token)


def may_be_drawn(
    token: int, logits: Tensor, move: float, tokens: list[int], given: int, params: SamplingParams
) -> bool:
    """Say whether truncation leaves a token, if its own logit is moved by so much."""
    row = controlled(logits.clone(), tokens, given, params.controls)[None]
    row[0, token] += move
    for truncate in truncations(params):
        row = truncate(torch.tensor([tokens]), row)
    return bool(row[0, token] > -torch.inf)


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
        found = [(s.score, s.token_ids) for s in best.sequences]
        assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
        near = 0.0 if world.has_equal_bits else 20 * TOLERANCE
        scores = [score for score, _ in expected]
        assert [score for score, _ in found] == pytest.approx(scores, abs=near, rel=0)


@pytest.mark.parametrize("kind", ["logprobs", "greedy with prefix", "beam"])
def test_logprobs_are_those_of_the_eager_model(world: World, kind: str) -> None:
    for asked, answer in world.answers[kind]:
        assert asked.params is not None and isinstance(answer.end, RequestFinished)
        given = world.eager.given(asked.prompt, asked.target)
        if asked.params.prompt_logprobs is not None:
            logprobs = world.eager.logprobs(asked.prompt, [given])[0]
            found = answer.end.prompt_logprobs
            allowed = world.eager.allowed(asked.prompt, given)
            assert_positions(found, given[1:], logprobs, allowed, asked.params.prompt_logprobs)
        for sequence in answer.sequences:
            tokens = generated(asked, sequence)
            row, start = [*given, *tokens], len(given) - 1
            logprobs = world.eager.logprobs(asked.prompt, [row])[0, start:]
            if asked.params.logprobs is not None:
                allowed = world.eager.allowed(asked.prompt, row)[start:]
                assert_positions(
                    sequence.logprobs, tokens, logprobs, allowed, asked.params.logprobs
                )
            total = float(logprobs[range(len(tokens)), tokens].sum())
            near = allowed_sum(world, asked, tokens)
            assert sequence.sum_logprob == pytest.approx(total, abs=near)


def test_scores_are_the_logprobs_of_the_eager_model(world: World) -> None:
    for asked, answer in world.answers["score"]:
        assert isinstance(answer.end, Score)
        given = world.eager.given(asked.prompt)
        row = [*given, *asked.target]
        logprobs = world.eager.logprobs(asked.prompt, [row])[0, len(given) - 1 :]

        allowed = world.eager.allowed(asked.prompt, row)[len(given) - 1 :]
        assert_positions(answer.end.positions, asked.target, logprobs, allowed, 2)
        total = float(logprobs[range(len(asked.target)), asked.target].sum())
        near = TOLERANCE if world.setup.form.precision == "fp32" else sum(allowed[:-1])
        assert answer.end.sum_logprob == pytest.approx(total, abs=near)


def assert_positions(
    found: tuple[PositionLogprobs, ...],
    tokens: list[int] | tuple[int, ...],
    logprobs: Tensor,  # [T or more, V]
    allowed: list[float],  # T or more
    num_top: int,
) -> None:
    assert [position.chosen.token_id for position in found] == list(tokens)
    for position, row, near in zip(found, logprobs, allowed, strict=False):
        assert [one.rank for one in position.top] == list(range(1, num_top + 1))
        best = row.topk(num_top).values.tolist() if num_top else []
        assert [one.logprob for one in position.top] == pytest.approx(best, abs=near)
        for one in (position.chosen, *position.top):
            logprob = float(row[one.token_id])
            assert one.logprob == pytest.approx(logprob, abs=near)
            fewest = 1 + int((row > logprob + near).sum())
            most = 1 + int((row > logprob - near).sum())
            assert fewest <= one.rank <= most


def test_the_score_of_an_answer_is_the_logprob_that_came_with_it(
    exported: Callable[..., Exported],
) -> None:
    for name, setup in (("gpt", CPU), ("encoder-decoder", CUDA_FP32)):
        config = EngineConfig(
            max_num_seqs=3, max_num_batched_tokens=12, prefill_chunk_size=4, num_threads=1
        )
        engine = setup.load(exported(name, setup.form).package, config)
        prompts = [Prompts(name).ids(length) for length in (1, 4, 5, 11)]

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
            expected = choice_scores(world, asked)
            near = max(allowed_sum(world, asked, tokens) for tokens, _ in expected.values())
            exact = {choice: score for choice, (_, score) in expected.items()}
            assert scores == pytest.approx(exact, abs=near)
            assert list(scores) == sorted(scores, key=lambda text: -scores[text])


def choice_scores(world: World, asked: Asked) -> dict[str, tuple[tuple[int, ...], float]]:
    letters = {world.text_of((token,)): token for token in range(3, VOCAB_SIZE - 1)}
    given, found = world.eager.given(asked.prompt), {}
    for choice in CHOICES:
        tokens = (*(letters[letter] for letter in choice), EOS)
        logprobs = world.eager.logprobs(asked.prompt, [[*given, *tokens]])[0, len(given) - 1 :]
        found[choice] = tokens, float(logprobs[range(len(tokens)), tokens].sum())
    return found
