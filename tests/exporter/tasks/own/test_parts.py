"""Examples are parted: some are learned from, some are judged by."""

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
    for rows, given, message in (
        (60, None, r"\d of 60 examples are for validation, at least 10 .*: give about 400 in all"),
        (0, 40, r"0 of 40 examples are to learn from, .*, and other examples to learn from"),
        (100, 12, r"\d of 112 examples are .*: give about 40 to judge by"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            divide(ROWS[40 : 40 + rows], str, None if given is None else ROWS[:given])
    divide(ROWS[:400], str)
    divide(ROWS[40:80], str, ROWS[:40])


def test_of_rows_that_are_alike_it_is_said_how_many_differ() -> None:
    with pytest.raises(ConfigError, match=r"^\d+ of 600 examples, of which 2 differ, are "):
        divide(["one", "other"] * 300, str)
