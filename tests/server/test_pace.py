"""The pace follows how late the event loop is."""

from __future__ import annotations

from server.pace import Pace


def _pace(most: int = 32) -> tuple[Pace, list[int]]:
    seen: list[int] = []
    pace = Pace(most, lambda: seen.append(pace.value))
    return pace, seen


def test_a_loop_in_time_leaves_whole_batches() -> None:
    pace, seen = _pace()
    for _ in range(50):
        pace.take(0.0001)

    assert (pace.value, seen) == (32, [])


def test_a_late_loop_hands_over_fewer_and_never_none() -> None:
    pace, seen = _pace()
    for _ in range(200):
        pace.take(0.05)

    assert seen[:3] == [22, 15, 10]
    assert pace.value == 2
    assert _pace(1)[0].value == 1


def test_one_late_moment_changes_nothing_and_a_quiet_time_brings_it_back() -> None:
    pace, _ = _pace()
    for _ in range(5):
        pace.take(0.05)
    assert pace.value == 22

    for lag in (0.0, 0.0, 0.9, 0.0, 0.0):
        pace.take(lag)
    assert pace.value == 22
    for _ in range(5 * 20):
        pace.take(0.0)
    assert pace.value == 32
