"""The sampler against transformers' logits processors, and the independence of its streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from engine.requests.request import LogitControls, SamplingParams
from engine.sampling.draws import Draw, Sampled
from engine.sampling.plain import SampledColumns, SamplingBatch, is_plain
from engine.sampling.random_stream import RandomStream, SequenceDraws
from engine.sampling.sampler import Sampler, num_top
from engine.sampling.top_k import step_logits
from engine.sampling.truncation import Truncations, pick, tempered, truncate, truncated_weights

VOCAB = 40


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32)


def draw(row: int = 0, *, seed: int = 1, index: int = 0, position: int = 5, banned=(), **params):
    strategy = params.pop("strategy", "sampling")
    settings = SamplingParams(strategy=strategy, **params)
    return Draw(row, settings, seed, index, position, tuple(banned))


def sample(logits: np.ndarray, draws: list) -> list:
    """Sample with no more of the likeliest tokens at hand than needed."""
    return Sampler().sample(step_logits(logits, max([1, *map(num_top_of, draws)])), draws)


def num_top_of(draw) -> int:
    return num_top(draw.params if isinstance(draw, Draw) else draw.beams[0].params)


def reference_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that `transformers` samples from."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits[None].copy()))
    return scores.softmax(-1)[0].double().numpy()


def our_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    scores, ids = truncate((logits - logits.max()) / np.float32(params.temperature), params)
    weights = np.exp(scores.astype(np.float64))
    found = np.zeros(len(logits))
    found[slice(None) if ids is None else ids] = weights / weights.sum()
    return found


@example(seed=391, vocab=700, temperature=2.8125, top_k=1, top_p=0.01, min_p=0.0, typical_p=1.0)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([3, 40, 700, 3000]),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 2, 7, 300]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 0.99]),
    typical_p=st.sampled_from([1.0, 1.0, 0.2, 0.95]),
)
def test_what_may_be_drawn_and_how_often_is_what_transformers_draws_from(
    seed: int,
    vocab: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
) -> None:
    logits = random_logits(seed, vocab=vocab)[0]
    params = SamplingParams(
        "sampling",
        temperature=temperature,
        top_k=min(top_k, vocab),
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
    )

    ours, theirs = our_probabilities(logits, params), reference_probabilities(logits, params)

    # One token at the very edge of top_p, or several of hardly any probability in all, may fall on
    # either side of a rounding error.
    differs = (ours > 0) != (theirs > 0)
    is_little = differs.sum() <= 1 or (ours + theirs)[differs].sum() < 1e-4
    # Two logits may be the same once they are divided: theirs looks for the largest ones then.
    assert is_little or np.ptp((logits / np.float32(temperature))[differs]) == 0
    if not differs.any():
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_of_equals_at_the_border_of_top_p_the_lower_ids_stay() -> None:
    scores = np.full(10, np.log(0.1), np.float32)
    scores[[4, 9]] = 0.0, -5.0

    _, ids = truncate(scores, SamplingParams("sampling", top_p=0.7))

    assert ids.tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"temperature": 0.5}, marks=pytest.mark.long),
        pytest.param({"temperature": 2.0, "top_k": 5}, marks=pytest.mark.long),
        pytest.param({"top_p": 0.7}, marks=pytest.mark.long),
        pytest.param({"min_p": 0.1}, marks=pytest.mark.long),
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
        pytest.param({"temperature": 0.7, "top_p": 0.8}, marks=pytest.mark.long),
        {"typical_p": 0.6},
    ],
)
def test_frequencies_of_many_draws_are_those_of_transformers(params: dict) -> None:
    logits = random_logits(3) * np.float32(0.4)
    wanted = reference_probabilities(logits[0], SamplingParams("sampling", **params))
    draws = [draw(position=n, **params) for n in range(20_000)]

    found = np.bincount([s.token_id for s in sample(logits, draws)], minlength=VOCAB)

    counted = wanted * len(draws) > 5  # rarer ones make chi-square unreliable
    expected = wanted[counted] * len(draws)
    chi_square = ((found[counted] - expected) ** 2 / expected).sum()
    freedom = counted.sum()
    assert found[wanted == 0].sum() == 0
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_greedy_takes_the_likeliest_and_the_lowest_id_among_equals() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, [30, 7]] = 4.0

    sampled = sample(logits, [draw(0, strategy="greedy"), draw(1, strategy="greedy")])

    assert [token.token_id for token in sampled] == [7, 0]


def test_logprobs_are_those_of_the_model_whatever_the_sampling() -> None:
    logits = random_logits(5, rows=3)
    draws = [
        draw(0, strategy="greedy"),
        draw(1, temperature=0.3, top_k=3),
        draw(2, strategy="greedy", banned=[int(logits[2].argmax())]),
    ]

    sampled = sample(logits, draws)

    wanted = torch.from_numpy(logits).log_softmax(-1).numpy()
    for row, token in enumerate(sampled):
        assert token.logprob == pytest.approx(wanted[row, token.token_id], abs=1e-5)


def test_banned_tokens_are_never_chosen() -> None:
    logits = np.zeros((1, 4), np.float32)
    logits[0, 2] = 50.0

    drawn = sample(logits, [draw(position=n, banned=[2, 0]) for n in range(200)])
    greedy = sample(logits, [draw(strategy="greedy", banned=[2, 0])])

    assert {token.token_id for token in drawn} == {1, 3}
    assert greedy[0].token_id == 1
    assert logits[0, 2] == 50.0


@pytest.mark.parametrize("strategy", ["greedy", "sampling"])
def test_a_forced_token_is_chosen_whatever_the_model_and_the_bans_say(strategy: str) -> None:
    logits = random_logits(4, rows=2, vocab=50)

    forced, free = sample(
        logits, [draw(0, strategy=strategy, banned=[7])._replace(forced=7), draw(1, seed=3)]
    )

    own = torch.from_numpy(logits).log_softmax(-1).numpy()
    assert forced.token_id == 7
    assert forced.logprob == pytest.approx(own[0, 7], abs=1e-5)
    assert [free] == sample(logits, [draw(1, seed=3)])


def test_a_draw_can_be_replayed_and_does_not_depend_on_its_batch_mates() -> None:
    logits = random_logits(9, rows=6, vocab=1000)
    draws = [draw(row, seed=row, position=row + 3, temperature=1.3, top_p=0.95) for row in range(6)]

    together = sample(logits, draws)
    backwards = sample(
        logits[::-1].copy(), [d._replace(logits_row=5 - d.logits_row) for d in draws[::-1]]
    )
    alone = [
        sample(logits[row : row + 1].copy(), [draws[row]._replace(logits_row=0)])[0]
        for row in range(6)
    ]

    assert together == alone == backwards[::-1]


def test_sequences_positions_and_seeds_have_streams_of_their_own() -> None:
    stream = RandomStream()
    numbers = [
        stream.uniform(seed, index, position)
        for seed in (0, 1, 2**64 - 1)
        for index in range(8)
        for position in range(500)
    ]

    assert len(set(numbers)) == len(numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.01
    assert all(0 <= number < 1 for number in numbers)
    assert stream.uniform(1, 0, 3) == RandomStream().uniform(1, 0, 3)


def test_the_stream_is_philox_with_key_seed_and_counter_position_and_index() -> None:
    raw = np.random.Philox(key=[123, 0], counter=[0, 7, 2, 0]).random_raw()

    assert RandomStream().uniform(123, 2, 7) == (int(raw) >> 11) / 2**53


def test_numbers_made_ahead_are_those_made_one_by_one() -> None:
    stream, alone = RandomStream(), RandomStream()
    draws = [SequenceDraws((n * 0x9E3779B97F4A7C15) % 2**64, n % 5) for n in range(9)]
    positions = [n * n for n in range(9)]

    for step in range(100):
        count = 9 if step % 7 else 2
        positions[:count] = [position + 1 for position in positions[:count]]
        found = stream.uniforms(draws[:count], positions[:count])

        assert found == [
            alone.uniform(one.seed, one.index, position)
            for one, position in zip(draws[:count], positions[:count], strict=True)
        ]


PLAIN = [
    SamplingParams(),
    SamplingParams("sampling", top_k=7),
    SamplingParams("sampling", top_k=40, top_p=0.8, temperature=0.7),
    SamplingParams("sampling", top_p=0.9),
    SamplingParams("sampling", top_p=0.999, min_p=0.001),
    SamplingParams("sampling", min_p=0.05, temperature=1.4),
    SamplingParams("sampling"),
    SamplingParams("sampling", temperature=1.9),
    SamplingParams("sampling", top_p=0.9, temperature=0.6),
    SamplingParams("sampling", top_p=0.99, min_p=0.001, temperature=2.5),
]


@settings(max_examples=30)
@given(
    asked=st.lists(st.sampled_from(PLAIN), min_size=1, max_size=12),
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([30, 400]),
    bad=st.sampled_from([None, np.nan, np.inf]),
    is_every_row=st.booleans(),
)
def test_plain_draws_choose_what_the_same_draws_choose_one_by_one(
    asked: list[SamplingParams], seed: int, vocab: int, bad: float | None, is_every_row: bool
) -> None:
    count = len(asked)
    logits = random_logits(seed, rows=2 * count, vocab=vocab)
    if bad is not None:
        logits[0, 3] = bad
    rows = np.arange(count) if is_every_row else np.arange(0, 2 * count, 2)
    step = step_logits(logits, max(map(num_top, asked)))
    which = [i for i, params in enumerate(asked) if params.strategy == "sampling"]
    columns = SampledColumns.of(
        which, [asked[i] for i in which], [SequenceDraws(seed, i) for i in which], vocab
    )
    plain = SamplingBatch(
        slice(count) if is_every_row else rows, columns if which else None, [5 + i for i in which]
    )

    found = Sampler().choose(step, plain)

    draws = [Draw(int(row), asked[i], seed, i, 5 + i, ()) for i, row in enumerate(rows)]
    alone = Sampler().sample(step, draws)
    assert all(map(is_plain, asked))
    assert list(found.failed) == [i for i, one in enumerate(alone) if one is None]
    assert [
        None if i in found.failed else Sampled(found.token_ids[i], found.logprobs[i])
        for i in range(count)
    ] == alone


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_gives_nothing_and_its_neighbours_do(bad: float) -> None:
    logits = random_logits(1, rows=3)
    logits[1, 17] = bad

    sampled = sample(logits, [draw(0), draw(1), draw(2, strategy="greedy")])

    assert [token is None for token in sampled] == [False, True, False]


def test_minus_infinity_is_a_token_that_the_model_rules_out() -> None:
    logits = np.full((2, 4), -np.inf, np.float32)
    logits[0, 3] = 1.0

    sampled = sample(logits, [draw(0), draw(1)])

    assert sampled[0].token_id == 3
    assert sampled[1] is None


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 1e6])
def test_extreme_temperatures_draw_without_overflow(temperature: float) -> None:
    logits = random_logits(2) * 100

    sampled = sample(logits, [draw(temperature=temperature)])

    if temperature < 1:
        assert sampled[0].token_id == logits[0].argmax()


def test_no_draws_need_no_logits() -> None:
    assert sample(np.zeros((0, 4), np.float32), []) == []


PARAMS = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 50, "temperature": 1.4},
    {"top_k": 256, "top_p": 0.8},
    {"top_k": 300},
    {"top_p": 0.4},
    {"top_p": 0.999},
    {"top_p": 0.5, "temperature": 0.8},
    {"min_p": 0.2, "temperature": 2.0},
    {"min_p": 0.2, "top_p": 0.7},
    {"typical_p": 0.5},
    {"top_k": 20, "controls": LogitControls(presence_penalty=0.3)},
    {"strategy": "greedy"},
]


@pytest.mark.parametrize("vocab", [30, 200, 2000])
def test_a_token_does_not_depend_on_what_its_batch_mates_ask_for(vocab: int) -> None:
    logits = random_logits(11, rows=len(PARAMS) * 3, vocab=vocab)
    draws = [
        draw(
            row,
            seed=row,
            banned=[int(logits[row].argmax())] if row % 3 == 2 else (),
            **{**PARAMS[row // 3], "top_k": min(PARAMS[row // 3].get("top_k", 0), vocab)},
        )._replace(tokens=[1, 2, 3], num_prompt=1)
        for row in range(len(logits))
    ]

    together = sample(logits, draws)
    alone = [
        sample(logits[row : row + 1].copy(), [one._replace(logits_row=0)])[0]
        for row, one in enumerate(draws)
    ]

    assert together == alone


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, 40]),
    top_p=st.sampled_from([0.2, 0.8, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
)
def test_the_likeliest_tokens_give_what_the_whole_row_gives(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(seed, vocab=400)
    params = SamplingParams(
        "sampling", temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    ids = np.argsort(-logits[0], kind="stable")[:128]
    scores = tempered(logits, np.array([[temperature]], np.float32))
    total = np.nan if top_k else np.exp(scores.astype(np.float64)).sum()

    found, is_cut = truncated_weights(
        scores[:, ids], np.array([total]), Truncations.of([params], [top_k or 128])
    )

    if top_k or is_cut[0]:
        whole = our_probabilities(logits[0], params)
        differs = (found[0] > 0) != (whole[ids] > 0)
        assert differs.sum() <= 1  # by a rounding error at the very edge of top_p
        if not differs.any():
            np.testing.assert_allclose(found[0] / found[0].sum(), whole[ids], atol=1e-6)
            assert whole[ids].sum() == pytest.approx(1)


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-6, 0.3, 1.0]), min_size=1, max_size=1500),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_picking_by_blocks_is_picking_by_the_cumulative_sum(weights, uniform: float) -> None:
    weights = np.array([*weights, 1.0, 0.0], np.float32)
    cumulative = weights.cumsum(dtype=np.float64)

    found = pick(weights, uniform)

    before = cumulative[found] - weights[found]
    target = uniform * cumulative[-1]
    assert weights[found] > 0
    assert before - 1e-9 <= target <= cumulative[found] + 1e-9


def test_num_top_is_what_the_strategy_needs_and_the_log_probabilities() -> None:
    def of(strategy: str = "sampling", **params) -> int:
        return num_top(SamplingParams(strategy, **params))

    assert of("greedy") == 1
    assert of("greedy", logprobs=5, prompt_logprobs=8) == 8
    assert of(top_k=50) == 50
    assert of(top_k=50, controls=LogitControls(presence_penalty=1.0)) == 50
    assert of(top_p=0.5) > of(top_p=0.5, controls=LogitControls(presence_penalty=1.0)) == 1
    assert of("beam", beam_width=4) == 8
    assert of("beam", beam_width=4, stop_token_ids=(7,)) == 12
    assert of(temperature=2.0) == 1
