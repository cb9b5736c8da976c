"""Bounds, and how much of a load keeps them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.errors import LoadTestError
from loadtest.goals import Slo, goodput, outcomes, parse_slo
from loadtest.metrics import RequestRecord, Window, summarize

ALL = Window(0.0, 10.0)


def answered(index: int, e2e: float, first: float = 0.1) -> RequestRecord:
    """A request that is due at `index` tenths of a second, and has two tokens."""
    due = index / 10
    return RequestRecord(
        index,
        0,
        scheduled=due,
        sent=due,
        finished=due + e2e,
        status="OK",
        token_times=(due + first, due + e2e),
        first_tokens=1,
        output_tokens=2,
    )


def failed(index: int) -> RequestRecord:
    return RequestRecord(index, 0, index / 10, index / 10, index / 10 + 0.001, "UNAVAILABLE")


def test_bounds_are_read_as_they_are_typed():
    slo = parse_slo("ttft=200ms, TPOT=50ms,e2e=2s", 95)

    assert slo == Slo({"ttft": 0.2, "tpot": 0.05, "e2e": 2.0}, 95)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=200", "ttft=x", "ttft=1..ms", "ttfx=1s", "ttft=0s"]
)
def test_what_is_no_bound_is_refused(text: str):
    with pytest.raises(LoadTestError):
        parse_slo(text)


def test_a_percentile_is_a_request_that_was_measured():
    records = [answered(index, e2e=0.1 + index / 1000) for index in range(100)]

    (kept,) = outcomes(records, ALL, parse_slo("e2e=198ms", 99))
    (missed,) = outcomes(records, ALL, parse_slo("e2e=198ms", 100))

    assert (kept.value, kept.is_kept) == (pytest.approx(0.199 - 1e-3, abs=2e-3), False)
    assert missed.value == pytest.approx(0.199)


def test_a_failed_request_is_above_every_bound():
    records = [answered(index, e2e=0.1) for index in range(98)] + [failed(98), failed(99)]

    (at_97,) = outcomes(records, ALL, parse_slo("e2e=1s", 97))
    (at_99,) = outcomes(records, ALL, parse_slo("e2e=1s", 99))

    assert (at_97.is_kept, at_97.why_none) == (True, "")
    assert (at_99.is_kept, at_99.value) == (False, None)
    assert str(at_99) == "p99 of e2e is none, for requests failed, bound 1000 ms"


def test_goodput_is_of_the_requests_that_keep_all_bounds_of_all_that_were_due():
    records = [
        answered(0, e2e=0.5),
        answered(1, e2e=3.0),  # too late
        answered(2, e2e=0.5, first=0.4),  # first token too late
        failed(3),
    ]

    good = goodput(records, ALL, parse_slo("ttft=200ms,e2e=2s"))

    assert (good.num_kept, good.num_due) == (1, 4)
    assert (good.share, good.per_second) == (0.25, 0.1)


def test_the_longest_gap_of_a_request_is_bound_by_itl():
    stalled = replace(answered(0, 2.0), token_times=(0.1, 0.2, 1.2, 1.3), output_tokens=4)

    assert not parse_slo("itl=500ms").is_kept_by(stalled)
    assert parse_slo("itl=1100ms").is_kept_by(stalled)


def test_a_request_of_one_token_misses_no_bound_of_later_tokens():
    single = replace(answered(0, 0.5), token_times=(0.1,), output_tokens=1)

    assert parse_slo("tpot=1ms,itl=1ms").is_kept_by(single)
    (outcome,) = outcomes([single], ALL, parse_slo("tpot=1ms"))
    assert outcome.is_kept


@pytest.mark.parametrize("name", ["ttft", "tpot", "itl"])
def test_bounds_of_tokens_are_not_kept_by_answers_that_come_as_wholes(name: str):
    wholes = [replace(answered(index, 0.1), token_times=()) for index in range(5)]
    slo = parse_slo(f"{name}=1s,e2e=1s")

    of_tokens, whole = outcomes(wholes, ALL, slo)

    assert whole.is_kept and not of_tokens.is_kept
    assert (
        str(of_tokens) == f"p99 of {name} is none, for no answer came token by token, bound 1000 ms"
    )
    assert goodput(wholes, ALL, slo).share == 0.0


def test_where_nothing_was_due_no_bound_was_kept():
    (outcome,) = outcomes([], ALL, parse_slo("e2e=1s"))

    assert not outcome.is_kept
    assert goodput([], ALL, parse_slo("e2e=1s")).share == 0.0


def test_warm_up_and_cool_down_are_in_no_figure():
    records = [answered(index, e2e=5.0 if index < 10 else 0.1) for index in range(40)]

    summary = summarize(records, Window(1.0, 3.0))

    assert summary.num_due == 20  # from 1.0 to 2.9, a tenth of a second each
    assert summary.end_to_end.max == pytest.approx(0.1)
    # Those of the warm-up have ended behind the window, those from 1.0 to 2.8 in it.
    assert summary.requests_per_second == pytest.approx(19 / 2.0)


def test_a_window_has_its_start_and_not_its_end():
    edges = [answered(10, e2e=1.0), answered(20, e2e=1.0)]

    summary = summarize(edges, Window(1.0, 2.0))

    assert (summary.num_due, summary.requests_per_second) == (
        1,
        0.0,
    )  # and the other ends in the next
    assert summarize(edges).requests_per_second == pytest.approx(2 / 3.0)  # both, the last too


def test_a_test_without_a_request_has_a_summary():
    summary = summarize([])

    assert (summary.num_due, summary.requests_per_second, summary.max_in_flight) == (0, 0.0, 0)
