"""Log-probabilities of chosen and given tokens, and their ranks, against log_softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.requests.events import PositionLogprobs
from engine.requests.request import LogitControls, SamplingParams
from engine.sampling.draws import Draw, TokensToScore
from engine.sampling.sampler import Sampler, num_top
from engine.sampling.top_k import largest, likeliest, step_logits

VOCAB = 60


def some_logits(rows: int, seed: int = 0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32)
    return logits.round(1)  # so that there are equals


def check(position: PositionLogprobs, row: np.ndarray, token_id: int, num_top: int) -> None:
    logprobs = torch.from_numpy(row).log_softmax(-1).numpy()
    best = sorted(range(VOCAB), key=lambda i: (-row[i], i))[:num_top]
    assert position.chosen.token_id == token_id
    assert [one.token_id for one in position.top] == best
    for one in (position.chosen, *position.top):
        assert one.logprob == pytest.approx(logprobs[one.token_id], abs=1e-5)
        assert one.rank == 1 + (row > row[one.token_id]).sum()


@pytest.mark.parametrize("num", [0, 1, 5, 20])
@pytest.mark.parametrize(
    "params",
    [
        {"strategy": "greedy"},
        {"strategy": "sampling", "temperature": 3.0},
        {"strategy": "sampling", "top_k": 7},
        {"strategy": "greedy", "controls": LogitControls(repetition_penalty=9.0)},
    ],
)
def test_a_chosen_token_tells_its_rank_and_the_likeliest_of_the_model(params, num: int) -> None:
    logits = some_logits(4)
    asked = SamplingParams(logprobs=num, **params)
    draws = [Draw(row, asked, 3, 0, row, (), list(range(40)), 1) for row in range(4)]

    found = Sampler().sample(step_logits(logits, num_top(asked)), draws)

    for row, token in enumerate(found):
        assert token.position.chosen.logprob == token.logprob
        check(token.position, logits[row], token.token_id, num)


def test_nothing_is_told_that_is_not_asked_for() -> None:
    draw = Draw(0, SamplingParams(), 0, 0, 0, ())

    (token,) = Sampler().sample(step_logits(some_logits(1), 1), [draw])

    assert token.position is None


@pytest.mark.parametrize("num", [0, 4])
def test_given_tokens_are_scored_one_a_row(num: int) -> None:
    logits, ids = some_logits(6), (7, 3, 59, 0)
    logits[:2] = np.nan  # rows of others

    found = Sampler().score(step_logits(logits, max(1, num)), TokensToScore(2, ids, num))

    assert found is not None and len(found) == 4
    for row, (token_id, position) in enumerate(zip(ids, found, strict=True), start=2):
        check(position, logits[row], token_id, num)


def test_a_row_that_is_not_finite_cannot_be_scored() -> None:
    logits = some_logits(3)
    logits[1, 5] = np.inf

    assert Sampler().score(step_logits(logits, 1), TokensToScore(0, (1, 2, 3), 0)) is None


@pytest.mark.parametrize("k", [1, 2, 9, VOCAB, VOCAB + 5])
def test_the_likeliest_are_in_order_with_the_lower_id_first_among_equals(k: int) -> None:
    for row in some_logits(5, seed=1).round():
        wanted = sorted(range(VOCAB), key=lambda i: (-row[i], i))[:k]

        assert likeliest(row, k).tolist() == wanted
        assert step_logits(row[None], k).top_ids[0].tolist() == wanted


@pytest.mark.parametrize("k", [1, 2, 9, 30])
@pytest.mark.parametrize("likely", [[], [3], list(range(0, VOCAB, 3)), list(range(VOCAB))])
def test_the_largest_do_not_depend_on_where_they_are_looked_for_first(
    k: int, likely: list[int]
) -> None:
    for row in some_logits(5, seed=2).round():
        row[::4] = -np.inf

        found = largest(row, k, np.array(likely, np.int64))

        assert found.tolist() == largest(row, k).tolist()
