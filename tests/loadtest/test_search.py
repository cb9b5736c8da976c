"""The search for the highest rate, on a simulated server whose knee is known."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from loadtest.arrival.arrival import ClosedLoop, OpenLoop
from loadtest.arrival.rates import Rates
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.goals import goodput, outcomes, parse_slo
from loadtest.load_report import LoadReport, Trial
from loadtest.metrics import RequestRecord, summarize, window_of
from loadtest.search import SearchRule
from loadtest.series import Series, SeriesReport

SERVICE, NUM_SERVERS = 0.05, 4  # seconds a request, at once: 80 requests a second are the most
CONFIG = LoadConfig(
    "a:1",
    "m",
    OpenLoop(Rates((5.0,)), "constant"),
    duration=12.0,
    warmup=2.0,
    slo=parse_slo("e2e=100ms"),
)


def simulated(config: LoadConfig) -> LoadReport:
    """Serve a load in no time: one queue in front of servers that take as long for each."""
    assert isinstance(config.arrival, OpenLoop)
    times = config.arrival.times(config.num_requests, config.duration, config.seed).tolist()
    free = [0.0] * NUM_SERVERS
    records = []
    for index, due in enumerate(times):
        start = max(due, heapq.heappop(free))
        heapq.heappush(free, start + SERVICE)
        records.append(RequestRecord(index, 0, due, due, start + SERVICE, "OK"))
    window = window_of(records, config.warmup, config.window_end)
    slo = config.slo
    return LoadReport(
        config=config,
        work="simulated",
        num_different=None,
        method="generate",
        started_at=datetime(2026, 1, 2, tzinfo=UTC),
        versions={},
        window=window,
        summary=summarize(records, window),
        records=tuple(records),
        goodput=goodput(records, window, slo) if slo else None,
        goals=outcomes(records, window, slo) if slo else (),
    )


def test_the_knee_of_a_simulated_server_is_found_within_10_percent_with_its_interval():
    report = Series(CONFIG, simulated).search(SearchRule(first_rate=5.0))

    search = report.search
    assert search is not None and search.rate is not None
    assert search.rate == pytest.approx(NUM_SERVERS / SERVICE, rel=0.1)
    assert search.low <= NUM_SERVERS / SERVICE <= search.high <= 1.1 * search.low
    assert search.confidence == 1 - 2**-5
    assert len(search.rounds) == 6
    assert report.problems == ()


def test_the_interval_of_random_arrivals_holds_what_many_rounds_find():
    poisson = replace(CONFIG, arrival=OpenLoop(Rates((5.0,))), slo=parse_slo("e2e=150ms"))

    few = Series(poisson, simulated).search(SearchRule(50.0, 0.02, 6)).search
    many = Series(replace(poisson, seed=9), simulated).search(SearchRule(50.0, 0.02, 21)).search

    assert few is not None and many is not None
    assert few.low < few.high
    assert few.low <= many.rate <= few.high


def test_a_search_from_above_the_knee_finds_it_as_well():
    search = Series(CONFIG, simulated).search(SearchRule(first_rate=1000.0, num_rounds=1)).search

    assert search.rate == pytest.approx(80, rel=0.1)
    assert search.rule == "bisection until the interval is 5.0% wide, 1 rounds"


def test_bounds_that_no_rate_keeps_are_told():
    never = replace(CONFIG, slo=parse_slo("e2e=1ms"), duration=None, num_requests=20, warmup=0.0)

    report = Series(never, simulated).search(SearchRule())

    assert report.search.rate is None
    assert "no rate was found that keeps the bounds" in report.problems
    assert "no rate kept the bounds, down to" in report.search.stopped


def test_a_search_ends_where_the_client_is_the_limit():
    def late(config: LoadConfig) -> LoadReport:
        report = simulated(config)
        is_late = config.arrival.rates.mean > 30
        return replace(report, invalid=("the load test itself was the limit",) if is_late else ())

    report = Series(CONFIG, late).search(SearchRule(first_rate=5.0))

    assert report.search.rate is None
    assert report.search.stopped == "at 40 requests/s the load test itself was the limit"
    assert report.problems == (
        "no rate was found that keeps the bounds",
        "at 40 requests/s the load test itself was the limit",
    )


def test_a_trial_with_a_late_client_is_made_again():
    calls = 0

    def late_at_times(config: LoadConfig) -> LoadReport:
        nonlocal calls
        calls += 1
        return replace(simulated(config), invalid=("late",) if calls % 2 else ())

    report = Series(CONFIG, late_at_times).search(SearchRule(5.0, num_rounds=1))

    assert report.search.rate == pytest.approx(80, rel=0.1)
    assert report.problems == ()


def test_an_interrupted_search_keeps_its_trials():
    calls = 0

    def cut(config: LoadConfig) -> LoadReport:
        nonlocal calls
        calls += 1
        return replace(simulated(config), interrupted=calls == 4)

    report = Series(CONFIG, cut).search(SearchRule())

    assert report.interrupted and len(report.trials) == 3


@pytest.mark.parametrize(
    "make",
    [lambda series: series.search(SearchRule()), lambda series: series.sweep((10.0, 20.0, 30.0))],
)
def test_an_interrupt_between_two_tests_leaves_those_that_were_done(
    make: Callable[[Series], SeriesReport],
):
    told: list[Trial] = []

    def interrupted(trial: Trial) -> None:
        told.append(trial)
        if len(told) == 2:
            raise KeyboardInterrupt

    report = make(Series(CONFIG, simulated, interrupted))

    assert report.interrupted
    assert len(report.trials) >= 1 and report.trials[0] == told[0]


def test_a_sweep_measures_each_rate_with_the_same_arrivals():
    report = Series(CONFIG, simulated).sweep((20.0, 40.0, 160.0))

    assert [trial.rate for trial in report.trials] == [20.0, 40.0, 160.0]
    assert [trial.is_kept for trial in report.trials] == [True, True, False]
    assert {trial.seed for trial in report.trials} == {0}
    assert report.search is None
    (problem,) = report.problems
    assert problem.startswith("at 160 requests/s threshold missed: p99 of e2e is ")


def test_a_search_needs_bounds_and_an_open_loop():
    with pytest.raises(LoadTestError, match="a search needs bounds to keep"):
        Series(replace(CONFIG, slo=None), simulated).search(SearchRule())
    with pytest.raises(LoadTestError, match="rates are those of an open loop"):
        Series(replace(CONFIG, arrival=ClosedLoop(2)), simulated)
