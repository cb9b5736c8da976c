"""What is learned from, and what is judged by."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from exporter.tasks.own.parts import divide

ROWS = [f"row {i}" for i in range(1000)]


def test_no_row_is_in_two_parts_and_none_is_lost() -> None:
    parts = divide(ROWS, str)

    assert sorted(row for part in parts for row in part) == sorted(ROWS)
    assert 60 < len(parts.held_out) < 140 and 25 < len(parts.validation) < 80


def test_more_data_move_no_row_to_another_part() -> None:
    few, many = divide(ROWS[:500], str), divide(ROWS, str)

    assert all(set(less) <= set(more) for less, more in zip(few, many, strict=True))


def test_rows_to_judge_by_that_a_person_gives_are_not_learned_from() -> None:
    given = ROWS[:200]

    parts = divide(ROWS, str, given)

    assert sorted(parts.training) == sorted(ROWS[200:])
    assert sorted(parts.validation + parts.held_out) == sorted(given)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\d examples are .*, at least 10 are needed; give more"):
        divide(ROWS[:60], str)
