"""The candidates of beam search against the plain search over all hypotheses and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitNormalization,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from engine.cuda.lazy_rows import LazyRows
from engine.requests.request import LogitControls, SamplingParams
from engine.sampling.draws import BeamExpansion, Candidate, Draw
from engine.sampling.sampler import Sampler, num_top
from engine.sampling.top_k import step_logits

VOCAB = 50


def beam_draw(
    width: int, scores, *, tokens=None, banned=(), candidates=None, **params
) -> BeamExpansion:
    settings = SamplingParams("beam", beam_width=width, **params)
    tokens = tokens or [[1]] * len(scores)
    beams = tuple(
        Draw(row, settings, 0, row, 0, banned, tokens[row], 1) for row in range(len(scores))
    )
    return BeamExpansion(beams, tuple(scores), candidates or 2 * width)


def candidates_of(logits: np.ndarray, draw: BeamExpansion, k: int | None = None):
    return Sampler().sample(step_logits(logits, k or num_top(draw.beams[0].params)), [draw])[0]


def reference(
    logits: np.ndarray, draw: BeamExpansion, processors=()
) -> list[tuple[int, int, float]]:
    """As transformers' `generate` finds them, beam by beam."""
    logprobs = torch.from_numpy(logits).log_softmax(-1)
    processed = [
        LogitsProcessorList(processors)(torch.tensor([beam.tokens]), row[None].clone())[0]
        for beam, row in zip(draw.beams, logprobs, strict=True)
    ]
    for row in processed:
        row[list(draw.beams[0].banned)] = -torch.inf
    totals = torch.stack(processed) + torch.tensor(draw.scores)[:, None]
    scores, indices = totals.flatten().topk(draw.num_candidates)
    return [
        (index // VOCAB, index % VOCAB, score)
        for index, score in zip(indices.tolist(), scores.tolist(), strict=True)
    ]


def check(logits: np.ndarray, draw: BeamExpansion, processors=()) -> None:
    found, wanted = candidates_of(logits, draw), reference(logits, draw, processors)

    own = torch.from_numpy(logits).log_softmax(-1).numpy()
    assert [(c.beam, c.token_id) for c in found] == [pair[:2] for pair in wanted]
    np.testing.assert_allclose([c.score for c in found], [w[2] for w in wanted], atol=1e-4)
    np.testing.assert_allclose(
        [c.logprob for c in found], [own[c.beam, c.token_id] for c in found], atol=1e-5
    )


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    width=st.integers(1, 16),
    running=st.integers(1, 16),
    banned=st.sets(st.integers(0, VOCAB - 1), max_size=3),
)
def test_candidates_are_the_best_of_all_hypotheses_and_tokens(
    seed: int, width: int, running: int, banned: set[int]
) -> None:
    rng, running = np.random.default_rng(seed), min(running, width)
    logits = rng.normal(0, 3, (running, VOCAB)).astype(np.float32)

    check(logits, beam_draw(width, rng.normal(-5, 1, running).tolist(), banned=tuple(banned)))


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_controls_change_log_probabilities_as_in_transformers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (4, VOCAB)).astype(np.float32)
    tokens = rng.integers(0, 12, (4, 30)).tolist()
    controls = LogitControls(repetition_penalty=1.3, no_repeat_ngram=2)

    check(
        logits,
        beam_draw(4, [-1.0, -1.5, -2.0, -4.0], tokens=tokens, controls=controls),
        [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2)],
    )


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    banned=st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    likely=st.sampled_from([-20.0, 0.0, 20.0]),
    penalty=st.sampled_from([1.0, 1.3]),
)
def test_what_controls_leave_adds_up_to_one_where_it_is_asked(
    seed: int, banned: set[int], likely: float, penalty: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (3, VOCAB)).astype(np.float32)
    logits[1:, list(banned)] += likely
    tokens = rng.integers(0, VOCAB, (3, 5)).tolist()
    controls = LogitControls(repetition_penalty=penalty)

    check(
        logits,
        beam_draw(
            3,
            [-1.0, -1.5, -2.0],
            tokens=tokens,
            banned=tuple(banned),
            controls=controls,
            renormalize=True,
        ),
        [
            RepetitionPenaltyLogitsProcessor(penalty),
            SuppressTokensLogitsProcessor([*banned]),
            LogitNormalization(),
        ],
    )


def test_more_candidates_than_the_likeliest_tokens_at_hand_come_from_whole_rows() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (2, VOCAB)).astype(np.float32)

    check(logits, beam_draw(2, [-1.0, -1.1], candidates=30))


def test_of_equals_the_earlier_hypothesis_and_the_lower_id_come_first() -> None:
    logits = np.zeros((2, VOCAB), np.float32)

    found = candidates_of(logits, beam_draw(3, [-1.0, -1.0]))

    assert [(c.beam, c.token_id) for c in found] == [(0, i) for i in range(6)]


def test_what_is_not_allowed_is_no_candidate() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    found = candidates_of(logits, beam_draw(4, [0.0], banned=tuple(range(3, VOCAB))))

    assert [c.token_id for c in found] == [0, 1, 2]


def test_a_forced_token_is_the_only_candidate_of_every_hypothesis_at_no_cost() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (3, VOCAB)).astype(np.float32)
    draw = beam_draw(3, [-1.0, -3.0, -2.0])
    forced = draw._replace(beams=tuple(beam._replace(forced=7) for beam in draw.beams))

    found = candidates_of(logits, forced)

    own = torch.from_numpy(logits).log_softmax(-1).numpy()
    assert [(c.beam, c.token_id, c.score) for c in found] == [
        (0, 7, -1.0),
        (2, 7, -2.0),
        (1, 7, -3.0),
    ]
    assert [c.logprob for c in found] == pytest.approx(own[[0, 2, 1], 7].tolist(), abs=1e-5)


def test_bans_outside_the_likeliest_tokens_need_no_whole_rows() -> None:
    logits = np.random.default_rng(2).normal(0, 3, (2, VOCAB)).astype(np.float32)
    least = int(logits.sum(axis=0).argmin())
    draw = beam_draw(2, [-1.0, -1.5], banned=(least,))
    step = step_logits(logits, num_top(draw.beams[0].params))

    (found,) = Sampler().sample(step._replace(logits=LazyRows(2, VOCAB, fail)), [draw])

    assert [(c.beam, c.token_id) for c in found] == [pair[:2] for pair in reference(logits, draw)]


def fail(rows: list[int]) -> list[np.ndarray]:
    """Be the rows that nobody may look at."""
    raise AssertionError("whole rows are read")


def test_candidates_do_not_depend_on_how_many_likeliest_tokens_others_want() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (3, VOCAB)).astype(np.float32)
    draws = [
        beam_draw(3, [-1.0, -2.0, -2.5]),
        beam_draw(3, [-1.0, -2.0, -2.5], candidates=9),
        beam_draw(3, [-1.0, -2.0, -2.5], banned=(int(logits[0].argmax()),)),
    ]

    for draw in draws:
        assert candidates_of(logits, draw) == candidates_of(logits, draw, k=VOCAB)


def test_searches_beside_each_other_get_the_bits_that_they_get_alone() -> None:
    rng = np.random.default_rng(3)
    kinds = [
        {"width": 2, "scores": [-1.0, -1.5]},
        {"width": 3, "scores": [-1.0, -1.5, -1.6]},
        {"width": 2, "scores": [-2.0, -3.0], "controls": LogitControls(logit_bias=((4, -1.0),))},
        {"width": 2, "scores": [-4.0, -4.5]},
        {"width": 2, "scores": [-1.0, -1.5], "banned": (7,)},
    ]
    draws = [beam_draw(**kind) for kind in kinds]  # each in the rows from 0 on
    logits = [rng.normal(0, 3, (len(d.scores), VOCAB)).astype(np.float32) for d in draws]
    starts = np.cumsum([0, *map(len, logits[:-1])]).tolist()
    moved = [
        draw._replace(beams=tuple(b._replace(logits_row=start + b.logits_row) for b in draw.beams))
        for start, draw in zip(starts, draws, strict=True)
    ]

    together = Sampler().sample(step_logits(np.concatenate(logits), VOCAB), moved)

    assert together == [
        candidates_of(own, draw, k=VOCAB) for own, draw in zip(logits, draws, strict=True)
    ]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_row_that_is_not_finite_fails_the_whole_search(bad: float) -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[2, 7] = bad
    broken = beam_draw(3, [-1.0, -2.0, -3.0])
    sound = BeamExpansion(broken.beams[:2], broken.scores[:2], 2)

    found = Sampler().sample(step_logits(logits, 6), [broken, sound])

    assert found[0] is None
    assert found[1] is not None and all(isinstance(one, Candidate) for one in found[1])


def test_candidates_tell_log_probabilities_at_their_position() -> None:
    logits = np.random.default_rng(2).normal(0, 3, (2, VOCAB)).astype(np.float32)

    found = candidates_of(logits, beam_draw(2, [-1.0, -1.2], logprobs=3))

    for one in found:
        assert one.position.chosen.token_id == one.token_id
        assert one.position.chosen.logprob == one.logprob
        assert one.position.top[0].token_id == logits[one.beam].argmax()
