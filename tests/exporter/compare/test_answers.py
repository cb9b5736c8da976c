"""How far what items are told is from what another form of a model tells of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.package.manifest import Answers, Contract, LabelScores
from exporter.compare.answers import compare_answers, nearest, vector_losses

RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(20, 8)).astype(np.float32)


def compared(scores: LabelScores = "softmax", **sides: Any) -> Answers:
    """Compare what two forms tell: by name of an output, what the first says, and the other."""
    contract = Contract("encoder", "classify", None, None, None, (), scores)
    pairs = {name: np.array(pair) for name, pair in sides.items()}
    one, other = ({name: pair[i] for name, pair in pairs.items()} for i in (0, 1))
    (size,) = {len(pair[0]) for pair in pairs.values()}
    return compare_answers(contract, size, one, other)


def test_labels_turn_where_another_is_the_likeliest() -> None:
    found = compared(logits=[[[0, 9], [2, 0], [0, 0.1]], [[0, 9], [0, 2], [0, 0]]])

    assert (found.items, found.labels, found.labels_turned) == (3, 3, 2)
    assert found.max_probability_diff == pytest.approx(np.tanh(1))
    assert found.max_score_diff is None and found.max_vector_loss is None


def test_labels_that_hold_by_themselves_turn_at_a_half() -> None:
    found = compared("sigmoid", logits=[[[0.1, -1], [2, 3]], [[-0.1, 1], [2, 9]]])

    assert (found.labels, found.labels_turned) == (2, 1)
    assert found.max_probability_diff == pytest.approx(2 / (1 + np.exp(-1)) - 1)


def test_scores_have_an_order() -> None:
    """Pairs that are equal in the other form have none."""
    found = compared("none", logits=[[[3], [1], [2], [2]], [[3], [1], [0.5], [1]]])

    assert (found.labels, found.max_score_diff) == (0, 1.5)
    assert (found.pairs, found.pairs_turned) == (5, 1)
    assert found.max_probability_diff is None


def test_a_single_label_by_itself_is_a_score() -> None:
    """Rerankers tell how well texts fit: their order counts, not which are above a half."""
    found = compared("sigmoid", logits=[[[3], [1], [2]], [[3], [2.5], [2]]])

    assert (found.labels, found.pairs, found.pairs_turned) == (0, 3, 1)
    assert found.max_score_diff == pytest.approx(1 / (1 + np.exp(-2.5)) - 1 / (1 + np.exp(-1)))


@pytest.mark.parametrize(
    ("angle", "size"), [(0, 1), (0, 7), (1e-3, 1), (0.5, 0.2), (np.pi / 2, 1), (np.pi, 3)]
)
def test_of_vectors_the_angle_counts_and_not_the_length(angle: float, size: float) -> None:
    one = np.array([[1.0, 0.0]])
    other = size * np.array([[np.cos(angle), np.sin(angle)]])

    assert vector_losses(one, other)[0] == pytest.approx(1 - np.cos(angle), rel=1e-6, abs=1e-15)


def test_a_small_angle_is_not_lost_in_rounding() -> None:
    other = VECTORS + 1e-9 * RNG.normal(size=VECTORS.shape)

    found = vector_losses(VECTORS, other)

    assert (found > 0).all() and found.max() < 1e-16


def test_a_vector_without_length_is_far_from_all_but_another_one() -> None:
    zeros, ones = np.zeros((1, 3)), np.ones((1, 3))

    assert vector_losses(zeros, ones) == vector_losses(ones, zeros) == 1
    assert vector_losses(zeros, zeros) == 0


def test_the_nearest_other_vector_is_that_at_the_smallest_angle() -> None:
    found = nearest(np.array([[1.0, 0.0], [100.0, 1.0], [0.0, 1.0], [0.1, 1.0]]))

    assert found.tolist() == [1, 0, 3, 2]


def test_vectors_tell_of_angles_numbers_and_neighbours() -> None:
    turned = VECTORS.copy()
    turned[4] *= -1

    same = compared(embedding=[VECTORS, 3 * VECTORS])
    found = compared(embedding=[turned, VECTORS])

    assert same.max_vector_loss == pytest.approx(0, abs=1e-12) and same.neighbours_kept == 20
    assert same.max_number_diff == pytest.approx(2 * np.abs(VECTORS).max())
    assert found.max_vector_loss == pytest.approx(2) and 10 < found.neighbours_kept < 20
    assert found.max_number_diff == 2 * np.abs(VECTORS[4]).max() and found.labels == 0
