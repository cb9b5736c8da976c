"""Penalties, bias and bans against transformers' logits processors, or plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.requests.request import Constraint, LogitControls, SamplingParams
from engine.sampling.draws import Draw
from engine.sampling.logit_controls import adjusted, is_controlled
from engine.sampling.sampler import Sampler
from engine.sampling.top_k import step_logits

VOCAB = 30

sequences = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


class Only:
    """A constraint that allows the same tokens at every position."""

    error = None

    def __init__(self, *token_ids: int) -> None:
        self._token_ids = list(token_ids)

    def allowed(self) -> np.ndarray:
        mask = np.zeros(VOCAB, np.bool_)
        mask[self._token_ids] = True
        return mask

    def advance(self, token_id: int) -> None: ...

    def fork(self) -> Only:
        return self


def scores_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


def draw(tokens=(), *, num_prompt: int = 0, banned=(), matcher=None, **controls) -> Draw:
    params = SamplingParams(controls=LogitControls(**controls))
    return Draw(0, params, 0, 0, len(tokens), banned, tokens, num_prompt, matcher)


@settings(max_examples=50)
@given(seed=st.integers(0, 1000), tokens=sequences, penalty=st.sampled_from([0.5, 1.2, 3.0]))
def test_repetition_penalty_is_that_of_transformers(seed: int, tokens, penalty: float) -> None:
    scores = scores_of(seed)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)

    wanted = theirs(torch.tensor([tokens]), torch.from_numpy(scores[None].copy()))[0].numpy()

    found = adjusted(scores, draw(tokens, num_prompt=1, repetition_penalty=penalty))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@settings(max_examples=100)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=20), size=st.integers(1, 5))
def test_no_repeat_ngram_is_that_of_transformers(tokens: list[int], size: int) -> None:
    scores = scores_of(1)
    theirs = NoRepeatNGramLogitsProcessor(size)

    wanted = theirs(torch.tensor([tokens]), torch.from_numpy(scores[None].copy()))[0].numpy()

    found = adjusted(scores, draw(tokens, no_repeat_ngram=size))
    np.testing.assert_array_equal(found, wanted)


@settings(max_examples=50)
@given(tokens=sequences, frequency=st.floats(-2, 2), presence=st.floats(-2, 2))
def test_frequency_and_presence_penalty_count_the_output_only(
    tokens: list[int], frequency: float, presence: float
) -> None:
    scores, num_prompt = scores_of(2), len(tokens) // 2
    wanted = scores.copy()
    for token_id in range(VOCAB):
        count = tokens[num_prompt:].count(token_id)
        wanted[token_id] -= frequency * count + presence * (count > 0)

    found = adjusted(
        scores,
        draw(
            tokens,
            num_prompt=num_prompt,
            frequency_penalty=frequency,
            presence_penalty=presence,
        ),
    )

    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_bias_and_bans_are_those_of_transformers() -> None:
    scores, bias = scores_of(3), ((4, -2.5), (9, 3.0))
    theirs = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias]),
            NoBadWordsLogitsProcessor([[5], [9]]),
        ]
    )

    wanted = theirs(torch.tensor([[1]]), torch.from_numpy(scores[None].copy()))[0].numpy()

    found = adjusted(scores, draw([1], logit_bias=bias, banned=(5, 9)))
    np.testing.assert_array_equal(found, wanted)


def test_all_controls_together_are_applied_in_the_order_of_transformers() -> None:
    scores, tokens = scores_of(4), [3, 4, 3, 7, 3]
    theirs = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.7), NoRepeatNGramLogitsProcessor(2)]
    )
    wanted = theirs(torch.tensor([tokens]), torch.from_numpy(scores[None].copy()))[0].numpy()
    wanted[[6, 8]] = wanted[6] + 2, -np.inf

    found = adjusted(
        scores,
        draw(
            tokens,
            repetition_penalty=1.7,
            no_repeat_ngram=2,
            logit_bias=((6, 2.0),),
            banned=(8,),
        ),
    )

    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_the_model_own_logits_are_left_as_they_are() -> None:
    scores = scores_of(5)
    before = scores.copy()

    adjusted(scores, draw([1, 2], repetition_penalty=2.0, banned=(3,), matcher=Only(4)))

    np.testing.assert_array_equal(scores, before)


ONLY = pytest.mark.parametrize(
    "only", [{"matcher": Only(2, 5)}, {"allowed_token_ids": (5, 2)}], ids=["constraint", "ids"]
)


@ONLY
def test_no_token_comes_that_is_not_allowed(only: dict[str, Any]) -> None:
    scores = scores_of(6)

    found = adjusted(scores, draw(**only))

    assert np.isfinite(found).nonzero()[0].tolist() == [2, 5]
    np.testing.assert_array_equal(found[[2, 5]], scores[[2, 5]])


@ONLY
def test_a_ban_gives_way_where_nothing_else_is_allowed(only: dict[str, Any]) -> None:
    scores = scores_of(7)

    found = adjusted(scores, draw(**only, banned=(2, 5, 7)))

    assert np.isfinite(found).nonzero()[0].tolist() == [2, 5]


def test_a_constraint_holds_even_where_the_model_rules_its_tokens_out() -> None:
    scores = np.full(VOCAB, -np.inf, np.float32)
    scores[1] = 0.0

    found = adjusted(scores, draw(matcher=Only(2, 5)))

    assert np.isfinite(found).nonzero()[0].tolist() == [2, 5]


def test_bans_of_the_whole_vocabulary_are_lifted() -> None:
    scores = scores_of(8)

    found = adjusted(scores, draw(list(range(VOCAB)), no_repeat_ngram=1))

    np.testing.assert_array_equal(found, scores)


def test_nothing_can_be_chosen_where_a_constraint_allows_nothing() -> None:
    params = SamplingParams(constraint=Constraint("regex", ("a",)))
    asked = draw(matcher=Only())._replace(params=params)

    assert Sampler().sample(step_logits(scores_of(9)[None], 1), [asked]) == [None]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), False),
        (SamplingParams(controls=LogitControls()), False),
        (SamplingParams(controls=LogitControls(presence_penalty=-0.5)), True),
        (SamplingParams(controls=LogitControls(banned_tokens=(1,))), False),
        (SamplingParams(controls=LogitControls(logit_bias=((1, 2.0),))), True),
        (SamplingParams(controls=LogitControls(allowed_token_ids=(1,))), True),
        (SamplingParams(constraint=Constraint("choice", ("a",))), True),
    ],
)
def test_only_requests_with_controls_need_whole_rows(
    params: SamplingParams, expected: bool
) -> None:
    assert is_controlled(params) is expected
