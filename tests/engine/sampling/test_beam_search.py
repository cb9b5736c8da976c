"""Beam search against a plain loop, a search of everything, and Hugging Face `generate`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from engine.requests.events import FinishReason, PositionLogprobs, TokenLogprob
from engine.requests.request import LogitControls, SamplingParams
from engine.sampling.beam_search import BeamSearch, Hypothesis
from engine.sampling.draws import Candidate
from engine.sampling.stop_rule import StopRule

Model = Callable[[tuple[int, ...]], list[float]]  # tokens so far -> a log-probability a token

EOS = frozenset({0})


def params(width: int, **others) -> SamplingParams:
    return SamplingParams(strategy="beam", beam_width=width, **others)


def search_for(p: SamplingParams, max_new_tokens: int, ends: frozenset[int] = EOS) -> BeamSearch:
    return BeamSearch(p, StopRule(p, ends, max_new_tokens))


def random_model(
    seed: int, vocab_size: int, *, ties: bool = False, biases: tuple[tuple[int, float], ...] = ()
) -> Model:
    @cache
    def model(tokens: tuple[int, ...]) -> list[float]:
        logits = np.random.default_rng([seed, *tokens]).normal(0, 1.5, vocab_size)
        logprobs = logits - np.logaddexp.reduce(logits)
        changed = np.ceil(logprobs) if ties else logprobs
        for token_id, bias in biases:
            changed[token_id] += bias
        return changed.tolist()

    return model


def best_candidates(histories: list, scores: tuple, model: Model, num: int) -> list[Candidate]:
    candidates = [
        Candidate(beam, token_id, score + logprob, logprob)
        for beam, (history, score) in enumerate(zip(histories, scores, strict=True))
        for token_id, logprob in enumerate(model(history))
    ]
    return sorted(candidates, key=lambda candidate: -candidate.score)[:num]


def run(search: BeamSearch, model: Model) -> tuple[list[Hypothesis], int]:
    """Search to the end; return what was found and the number of steps."""
    histories: list[tuple[int, ...]] = [()]
    for num_steps in itertools.count():
        if search.is_done:
            return search.hypotheses(), num_steps
        candidates = best_candidates(histories, search.scores, model, search.num_candidates)
        step = search.advance(candidates)
        pairs = zip(step.parents, step.tokens, strict=True)
        histories = [(*histories[parent], token) for parent, token in pairs]
    raise AssertionError


def found(model: Model, settings: SamplingParams, max_new_tokens: int, ends=EOS):
    search = search_for(settings, max_new_tokens, frozenset(ends))
    return [(h.token_ids, h.score) for h in run(search, model)[0]]


def penalised(total: float, tokens: tuple[int, ...], p: SamplingParams) -> float:
    if p.length_penalty_form == "power":
        return total / len(tokens) ** p.length_penalty
    exponent = 0.6 if p.length_penalty is None else p.length_penalty
    return total / ((5 + len(tokens)) / 6) ** exponent


def plain_beam_search(
    model: Model, p: SamplingParams, max_new_tokens: int, ends: frozenset[int]
) -> list[tuple[tuple[int, ...], float]]:
    """The algorithm on lists of whole sequences, always to the last step."""
    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[tuple[int, ...], float]] = []
    for length in range(1, max_new_tokens + 1):
        continuations = [
            ((*tokens, token_id), total + logprob)
            for tokens, total in running
            for token_id, logprob in enumerate(model(tokens))
        ]
        continuations.sort(key=lambda item: -item[1])
        is_open = [
            tokens[-1] not in ends and length < max_new_tokens for tokens, _ in continuations
        ]
        for (tokens, total), goes_on in list(zip(continuations, is_open, strict=True))[
            : p.beam_width
        ]:
            if not goes_on:
                finished.append((tokens, penalised(total, tokens, p)))
        running = list(itertools.compress(continuations, is_open))[: p.beam_width]
    return sorted(finished, key=lambda item: -item[1])[: p.num_outputs]


def optimum(
    model: Model, p: SamplingParams, max_new_tokens: int, vocab_size: int
) -> tuple[tuple[int, ...], float]:
    """The best of all sequences that there are."""

    def complete(tokens: tuple[int, ...], total: float):
        if tokens and (tokens[-1] in EOS or len(tokens) == max_new_tokens):
            yield tokens, penalised(total, tokens, p)
            return
        for token_id, logprob in enumerate(model(tokens)):
            yield from complete((*tokens, token_id), total + logprob)

    return max(complete((), 0.0), key=lambda item: item[1])


@settings(max_examples=300)
@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.integers(2, 7),
    width=st.integers(1, 16),
    num_outputs=st.integers(1, 8),
    exponent=st.sampled_from([0.0, 0.6, 1.0, 2.5, -0.5]),
    max_new_tokens=st.integers(1, 8),
    num_ends=st.integers(1, 3),
    ties=st.booleans(),
    biases=st.sampled_from([(), ((0, -1.0),), ((1, 1.5),)]),
    form=st.sampled_from(["power", "paper"]),
    beam_end=st.sampled_from(["bound", "limit"]),
)
def test_search_finds_what_a_plain_loop_finds_whether_it_stops_early_or_not(
    seed,
    vocab_size,
    width,
    num_outputs,
    exponent,
    max_new_tokens,
    num_ends,
    ties,
    biases,
    form,
    beam_end,
):
    model = random_model(seed, vocab_size, ties=ties, biases=biases)
    ends = frozenset(range(min(num_ends, vocab_size - 1)))
    p = params(
        width,
        num_outputs=min(num_outputs, width),
        length_penalty=exponent,
        length_penalty_form=form,
        beam_end=beam_end,
        controls=LogitControls(logit_bias=biases),
    )

    assert found(model, p, max_new_tokens, ends) == plain_beam_search(
        model, p, max_new_tokens, ends
    )


@pytest.mark.parametrize("beam_end", ["bound", "limit"])
@pytest.mark.parametrize(
    "penalty",
    [
        {"length_penalty_form": "power", "length_penalty": 0.0},
        {},
        {"length_penalty_form": "paper", "length_penalty": 1.0},
        {"length_penalty_form": "power", "length_penalty": 1.0},
    ],
)
@pytest.mark.parametrize(("vocab_size", "max_new_tokens"), [(2, 4), (3, 3), (4, 3), (8, 2)])
def test_beams_for_all_sequences_find_the_optimum(vocab_size, max_new_tokens, penalty, beam_end):
    p = params(vocab_size**max_new_tokens, beam_end=beam_end, **penalty)
    for seed in range(5):
        model = random_model(seed, vocab_size)

        assert found(model, p, max_new_tokens) == [optimum(model, p, max_new_tokens, vocab_size)]


@pytest.mark.parametrize(("width", "num_outputs"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("ends", [[3], list(range(20, 30))])
@pytest.mark.parametrize("power", [1.0, 0.0, -1.5])
@pytest.mark.parametrize(
    ("beam_end", "early_stopping"), [("bound", "never"), ("estimate", False), ("enough", True)]
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_search_finds_what_hugging_face_finds(
    seed, beam_end, early_stopping, power, ends, width, num_outputs
):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=8, n_layer=1, n_head=2, initializer_range=0.7
    )
    eager = GPT2LMHeadModel(config).eval()
    prompt = [5, 9]

    def model(tokens: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            logits = eager(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        return logits.log_softmax(-1).tolist()

    expected = eager.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 2, dtype=torch.long),
        num_beams=width,
        num_return_sequences=num_outputs,
        length_penalty=power,
        early_stopping=early_stopping,
        max_new_tokens=8,
        eos_token_id=ends,
        pad_token_id=63,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    p = params(width, num_outputs=num_outputs, length_penalty=power, beam_end=beam_end)
    ours = found(model, p, 8, ends)

    for (tokens, score), theirs, their_score in zip(
        ours, expected.sequences.tolist(), expected.sequences_scores.tolist(), strict=True
    ):
        padding = [63] * (len(theirs) - len(prompt) - len(tokens))
        assert [*prompt, *tokens, *padding] == theirs
        assert score == pytest.approx(their_score, abs=1e-4)


def sequence_model(*steps: list[float]) -> Model:
    """The same probabilities whatever was written before; a token a column."""
    return lambda tokens: [math.log(p) if p else -math.inf for p in steps[len(tokens)]]


def test_search_ends_as_soon_as_no_open_hypothesis_can_win():
    model = sequence_model([0.9, 0.05, 0.05], *[[0.4, 0.3, 0.3]] * 9)

    early = run(search_for(params(2), 10), model)
    late = run(search_for(params(2, beam_end="limit"), 10), model)

    assert early[0] == late[0]
    assert early[1] == 1
    assert late[1] == 10


@pytest.mark.parametrize(
    ("penalty", "divisor"),
    [
        ({}, (8 / 6) ** 0.6),
        ({"length_penalty_form": "paper"}, (8 / 6) ** 0.6),
        ({"length_penalty_form": "power"}, 3),
        ({"length_penalty": 2.0}, 9),
        ({"length_penalty": 2.0, "length_penalty_form": "paper"}, (8 / 6) ** 2),
    ],
)
def test_a_penalty_is_a_power_of_the_length_unless_the_papers_is_asked_for(penalty, divisor):
    model = sequence_model(*[[0.0, 1.0, 0.0]] * 2, [0.5, 0.5, 0.0])

    (best,), _ = run(search_for(params(1, **penalty), 3), model)

    assert best.score == pytest.approx(math.log(0.5) / divisor)


def test_search_goes_on_while_a_longer_hypothesis_may_score_more():
    model = sequence_model([0.6, 0.4, 0.0], *[[0.0, 1.0, 0.0]] * 9)
    short, long = math.log(0.6), math.log(0.4) / ((5 + 10) / 6) ** 1.0

    search = search_for(params(2, length_penalty=1.0, length_penalty_form="paper"), 10)
    (best,), num_steps = run(search, model)

    assert num_steps == 10
    assert best.token_ids == (1,) * 10
    assert best.score == pytest.approx(long) and long > short


@pytest.mark.parametrize(
    ("controls", "is_early"),
    [
        (LogitControls(logit_bias=((1, -1.0),), frequency_penalty=0.5, presence_penalty=0.5), True),
        (LogitControls(repetition_penalty=0.5), True),
        (LogitControls(logit_bias=((1, -1.0), (2, 0.1))), False),
        (LogitControls(frequency_penalty=-0.1), False),
        (LogitControls(presence_penalty=-0.1), False),
    ],
)
def test_search_goes_on_where_controls_can_make_scores_rise(controls, is_early):
    search = search_for(params(2, controls=controls), 10)

    search.advance([Candidate(0, 0, -0.1, -0.1), Candidate(0, 1, -9.0, -9.0)])

    assert search.is_done == is_early


def test_search_goes_on_while_a_penalty_on_long_ones_lets_the_next_step_win():
    model = sequence_model([0.3, 0.7, 0.0], *[[1.0, 0.0, 0.0]] * 39)

    search = search_for(params(2, length_penalty=-1.0, length_penalty_form="paper"), 40)

    assert run(search, model)[0][0].token_ids == (1, 0)


def test_search_may_end_as_soon_as_its_width_has_ended_or_by_an_estimate():
    # The best goes on to win at the end; the other two end first.
    model = sequence_model([0.1, 0.9, 0.0], [0.05, 0.95, 0.0], *[[0.0, 1.0, 0.0]] * 8)

    def steps(**others) -> tuple[int, int]:
        p = params(2, length_penalty=1.0, **others)
        (best,), num_steps = run(search_for(p, 10), model)
        return len(best.token_ids), num_steps

    assert steps(beam_end="enough") == (2, 2)
    assert steps(beam_end="estimate") == steps(beam_end="bound") == (10, 10)


def test_an_estimate_ends_a_search_that_could_still_find_better():
    model = sequence_model([0.6, 0.4, 0.0], [0.7, 0.3, 0.0], *[[0.0, 1.0, 0.0]] * 8)

    def found_by(**others) -> tuple[int, int]:
        p = params(2, length_penalty=1.0, **others)
        (best,), num_steps = run(search_for(p, 10), model)
        return len(best.token_ids), num_steps

    assert found_by(beam_end="estimate") == (1, 2)
    assert found_by(beam_end="bound") == (10, 10)


def test_a_search_that_is_closed_before_its_first_token_has_a_score():
    search = search_for(params(2, length_penalty=-1.0), 5)

    search.close(FinishReason.DEADLINE)

    assert [h.score for h in search.hypotheses()] == [0.0]


def test_an_end_beyond_the_best_width_candidates_is_dropped():
    search = search_for(params(2, length_penalty=0.0), 5)

    step = search.advance(
        [Candidate(0, 1, -1.0, -1.0), Candidate(0, 2, -2.0, -2.0), Candidate(0, 0, -3.0, -3.0)]
    )

    assert (step.parents, step.tokens, step.num_finished) == ((0, 0), (1, 2), 0)
    assert search.scores == (-1.0, -2.0)
    assert search.hypotheses() == []


def test_a_candidate_that_is_not_allowed_is_no_hypothesis():
    search = search_for(params(3), 5)

    step = search.advance([Candidate(0, 1, -1.0, -1.0), Candidate(0, 0, -math.inf, -2.0)])

    assert (step.tokens, step.num_finished) == ((1,), 0)


def test_search_without_any_allowed_candidate_is_over_and_finds_nothing():
    search = search_for(params(3), 5)

    search.advance([Candidate(0, 1, -math.inf, -1.0)])

    assert search.is_done
    assert search.hypotheses() == []


@pytest.mark.parametrize(
    ("ignore_eos", "stop_token_ids", "expected"),
    [(False, (), 6), (False, (1, 2), 12), (True, (), 6), (True, (1,), 6), (False, (0, 1), 9)],
)
def test_candidates_are_enough_for_the_beams_if_all_others_end(
    ignore_eos, stop_token_ids, expected
):
    p = params(3, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids)

    assert search_for(p, 5).num_candidates == expected


@pytest.mark.parametrize(
    ("token_id", "others", "reason", "matched_stop"),
    [
        (0, {}, FinishReason.EOS, None),
        (4, {"stop_token_ids": (4,)}, FinishReason.STOP, 4),
        (0, {"ignore_eos": True, "max_new_tokens": 1}, FinishReason.LENGTH, None),
        (1, {"max_new_tokens": 1}, FinishReason.LENGTH, None),
        (1, {"max_new_tokens": 7}, FinishReason.CONTEXT_FULL, None),
        (1, {}, FinishReason.CONTEXT_FULL, None),
    ],
)
def test_a_hypothesis_says_why_it_ended(token_id, others, reason, matched_stop):
    search = search_for(params(1, **others), 1)

    search.advance([Candidate(0, token_id, -1.0, -1.0)])

    (hypothesis,) = search.hypotheses()
    assert search.is_done
    assert (hypothesis.reason, hypothesis.matched_stop) == (reason, matched_stop)


def position(token_id: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token_id, -1.0, 1))


def test_a_hypothesis_has_the_sums_log_probabilities_and_beams_of_its_own_tokens():
    search = search_for(params(2, length_penalty=0.0), 3)

    search.advance([Candidate(0, 1, -0.5, -0.6, position(1)), Candidate(0, 2, -1, -1, position(2))])
    search.advance(
        [Candidate(1, 3, -1.5, -2, position(3)), Candidate(0, 3, -1.75, -2, position(3))]
    )
    search.advance([Candidate(0, 0, -2.0, -4, position(0)), Candidate(1, 1, -2.5, -4, position(1))])

    (hypothesis,) = search.hypotheses()
    assert hypothesis.token_ids == (2, 3, 0)
    assert hypothesis.beams == (0, 1, 0)
    assert hypothesis.score == -2.0
    assert hypothesis.sum_logprob == -7.0
    assert hypothesis.logprobs == (position(2), position(3), position(0))
    assert search.num_discarded == 3


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 5), num_outputs=st.integers(1, 5))
def test_every_chosen_token_is_returned_or_counted_as_discarded(seed, width, num_outputs):
    p = params(width, num_outputs=min(num_outputs, width), beam_end="limit")
    model, search = random_model(seed, 4), search_for(p, 5)
    histories: list[tuple[int, ...]] = [()]
    num_chosen = 0

    while not search.is_done:
        candidates = best_candidates(histories, search.scores, model, search.num_candidates)
        step = search.advance(candidates)
        pairs = zip(step.parents, step.tokens, strict=True)
        histories = [(*histories[parent], token) for parent, token in pairs]
        num_chosen += len(step.tokens) + step.num_finished

    returned = {h.token_ids[: n + 1] for h in search.hypotheses() for n in range(len(h.token_ids))}
    assert search.num_discarded == num_chosen - len(returned)


def test_a_closed_search_makes_up_what_is_missing_from_the_best_that_run():
    p = params(3, num_outputs=2, length_penalty=0.0)
    search = search_for(p, 9)
    search.advance([Candidate(0, token, -1.0 * token - 1, -1.0) for token in (1, 2, 0, 3)])

    search.close(FinishReason.DEADLINE)

    assert search.is_done
    assert [(h.token_ids, h.reason) for h in search.hypotheses()] == [
        ((0,), FinishReason.EOS),
        ((1,), FinishReason.DEADLINE),
    ]


def test_a_long_search_is_read_and_forgotten_without_recursion():
    search = search_for(params(1, ignore_eos=True), 20_000)

    while not search.is_done:
        search.advance([Candidate(0, 1, search.scores[0] - 1, -1.0)])

    (hypothesis,) = search.hypotheses()
    assert len(hypothesis.token_ids) == 20_000
    del search
