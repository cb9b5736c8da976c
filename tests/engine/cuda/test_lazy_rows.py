"""Rows that are fetched when they are read, and which of them the readers of logits want."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from engine.cuda.lazy_rows import LazyRows
from engine.requests.request import LogitControls, SamplingParams
from engine.sampling.draws import BeamExpansion, Draw, TokensToScore
from engine.sampling.logits import StepLogits
from engine.sampling.sampler import Sampler, num_top, reads_rows
from engine.sampling.top_k import step_logits

VOCAB = 60
NUM_ROWS = 8


class Fetches:
    """Rows of random logits, and what was asked of them."""

    def __init__(self, num_rows: int = NUM_ROWS, vocab: int = VOCAB) -> None:
        self.logits = np.random.default_rng(1).normal(0, 3, (num_rows, vocab)).astype(np.float32)
        self.seen: list[list[int]] = []
        self.lazy = LazyRows(num_rows, vocab, self._fetch)

    def _fetch(self, rows: Sequence[int]) -> Iterable[np.ndarray]:
        self.seen.append(list(rows))
        return [self.logits[row] for row in rows]

    def step(self, k: int) -> StepLogits:
        return step_logits(self.logits, k)._replace(logits=self.lazy)


def test_a_row_is_fetched_once_and_several_together() -> None:
    rows = Fetches()

    assert rows.lazy.shape == (NUM_ROWS, VOCAB) and len(rows.lazy) == NUM_ROWS
    np.testing.assert_array_equal(rows.lazy[5], rows.logits[5])
    rows.lazy.fetch([2, 5, 1, 2])
    np.testing.assert_array_equal(rows.lazy[1:3], rows.logits[1:3])

    assert rows.seen == [[5], [1, 2]]


def test_lazy_rows_are_read_as_a_whole_like_an_array() -> None:
    rows = Fetches()

    np.testing.assert_array_equal(np.asarray(rows.lazy), rows.logits)
    np.testing.assert_array_equal(np.concatenate([rows.lazy, rows.lazy])[NUM_ROWS:], rows.logits)

    assert rows.seen == [list(range(NUM_ROWS))]


def test_an_empty_piece_fetches_nothing() -> None:
    rows = Fetches()

    assert rows.lazy[3:3].shape == (0, VOCAB)
    rows.lazy.fetch([])

    assert rows.seen == []


def draw(row: int, **params: object) -> Draw:
    return Draw(row, SamplingParams(**params), 7, 0, row, (), list(range(9)), 1)


def beams(rows: Sequence[int], **params: object) -> BeamExpansion:
    found = tuple(draw(row, strategy="beam", beam_width=len(rows), **params) for row in rows)
    return BeamExpansion(found, tuple(-float(row) for row in rows), 2 * len(rows))


CONTROLS = LogitControls(repetition_penalty=3.0)
READ_NOT: dict[str, Draw | BeamExpansion] = {
    "greedy": draw(1),
    "greedy with log-probabilities": draw(1, logprobs=5),
    "top-k": draw(1, strategy="sampling", top_k=8),
    "top-k with log-probabilities": draw(1, strategy="sampling", top_k=8, logprobs=3),
    "nucleus": draw(1, strategy="sampling", top_p=0.8),
    "beams": beams([1, 2]),
}
READ: dict[str, Draw | BeamExpansion] = {
    "all tokens": draw(1, strategy="sampling"),
    "controls": draw(1, controls=CONTROLS),
    "nucleus at a temperature": draw(1, strategy="sampling", top_p=0.8, temperature=0.7),
    "beams with controls": beams([1, 2], controls=CONTROLS),
    "beams with log-probabilities": beams([1, 2], logprobs=2),
}


def k_of(*draws: Draw | BeamExpansion) -> int:
    return max(num_top((d.beams[0] if isinstance(d, BeamExpansion) else d).params) for d in draws)


@pytest.mark.parametrize("name", READ_NOT)
def test_what_the_likeliest_tokens_are_enough_for_fetches_nothing(name: str) -> None:
    rows, asked = Fetches(), READ_NOT[name]

    found = Sampler().sample(rows.step(k_of(asked)), [asked])

    assert found == Sampler().sample(step_logits(rows.logits, k_of(asked)), [asked])
    assert rows.seen == []


@pytest.mark.parametrize("name", READ)
def test_what_reads_whole_rows_fetches_its_own(name: str) -> None:
    rows, asked = Fetches(), READ[name]

    found = Sampler().sample(rows.step(k_of(asked)), [asked])

    assert found == Sampler().sample(step_logits(rows.logits, k_of(asked)), [asked])
    assert rows.seen == [[1, 2]] if isinstance(asked, BeamExpansion) else [[1]]
    assert reads_rows(asked)


def test_beams_that_read_no_rows_say_so_and_all_others_that_they_may() -> None:
    rng, said = np.random.default_rng(2), Counter[bool]()
    for _ in range(300):
        rows, asked = Fetches(), random_beams(rng)

        found = Sampler().sample(rows.step(k_of(asked)), [asked])

        assert found == Sampler().sample(step_logits(rows.logits, k_of(asked)), [asked])
        assert reads_rows(asked) or not rows.seen, asked
        said[reads_rows(asked)] += 1
    assert said[False] > 50 and said[True] > 50


def random_beams(rng: np.random.Generator) -> BeamExpansion:
    def happens() -> bool:
        return bool(rng.random() < 0.2)

    found = beams(
        rng.permutation(NUM_ROWS)[: rng.integers(1, 4)].tolist(),
        logprobs=2 if happens() else None,
        stop_token_ids=(3, 4) if happens() else (),
        renormalize=happens(),
        controls=CONTROLS if happens() else LogitControls(),
    )
    members = found.beams
    if happens():
        members = tuple(one._replace(banned=tuple(rng.integers(0, VOCAB, 2))) for one in members)
    if happens():
        members = tuple(one._replace(forced=7) for one in members)
    return found._replace(beams=members, num_candidates=int(rng.integers(1, 9)))


def test_all_draws_of_a_step_fetch_together() -> None:
    rows = Fetches()
    draws = [replace_row(READ[name], row) for row, name in enumerate(list(READ)[:3])]

    Sampler().sample(rows.step(k_of(*draws)), [draw(7), *draws])

    assert rows.seen == [[0, 1, 2]]


def test_a_draw_that_goes_on_behind_the_likeliest_tokens_fetches_its_row() -> None:
    rows, asked = Fetches(vocab=400), draw(1, strategy="sampling", top_p=0.99)
    rows.logits[:] /= 100  # nearly uniform: the nucleus is nearly all

    found = Sampler().sample(rows.step(k_of(asked)), [asked])

    assert found == Sampler().sample(step_logits(rows.logits, k_of(asked)), [asked])
    assert rows.seen == [[1]]


def test_given_tokens_are_scored_from_rows_that_are_fetched_together() -> None:
    rows, asked = Fetches(), TokensToScore(2, (7, 3, 59), 4)

    found = Sampler().score(rows.step(4), asked)

    assert found == Sampler().score(step_logits(rows.logits, 4), asked)
    assert rows.seen == [[2, 3, 4]]


def replace_row(asked: Draw | BeamExpansion, row: int) -> Draw:
    assert isinstance(asked, Draw)
    return asked._replace(logits_row=row)
