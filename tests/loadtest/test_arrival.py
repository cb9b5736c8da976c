"""When requests are due."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.arrival.arrival import ClosedLoop, OpenLoop, Replay
from loadtest.arrival.rates import Rates, parse_rates
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError

POISSON = OpenLoop(Rates((50.0,)))


def gaps(arrival: OpenLoop, num_requests: int = 5000, seed: int = 0) -> np.ndarray:
    return np.diff(arrival.times(num_requests, None, seed))


def test_constant_arrivals_are_evenly_spaced():
    times = OpenLoop(Rates((10.0,)), "constant").times(4, None, seed=0)

    assert times == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential():
    found = gaps(POISSON)

    assert found.min() > 0
    assert found.mean() == pytest.approx(1 / 50, rel=0.05)
    assert found.std() == pytest.approx(1 / 50, rel=0.05)
    # Memoryless: e^-1 of the gaps are longer than the mean.
    assert (found > 1 / 50).mean() == pytest.approx(np.exp(-1), abs=0.02)


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_gamma_gaps_have_the_mean_of_their_rate_and_a_spread_of_their_own(
    burstiness: float, spread: float
):
    found = gaps(OpenLoop(Rates((50.0,)), "gamma", burstiness), 40_000)

    assert found.mean() == pytest.approx(1 / 50, rel=0.05)
    assert found.std() == pytest.approx(spread / 50, rel=0.05)


def test_arrivals_repeat_with_their_seed():
    assert POISSON.times(9, None, 0).tolist() == POISSON.times(9, None, 0).tolist()
    assert POISSON.times(9, None, 0).tolist() != POISSON.times(9, None, 1).tolist()


def test_one_request_is_due_at_once():
    assert POISSON.times(1, None, seed=0).tolist() == [0.0]


@pytest.mark.parametrize("process", ["constant", "poisson", "gamma"])
def test_a_duration_has_about_as_many_requests_as_its_rate_says(process: str):
    times = OpenLoop(Rates((50.0,)), process, 0.5).times(None, 100.0, seed=0)

    assert len(times) == pytest.approx(5000, rel=0.1)
    assert 99 < times[-1] < 100


def test_the_end_of_a_test_is_the_first_of_number_and_duration():
    constant = OpenLoop(Rates((10.0,)), "constant")

    assert len(constant.times(5, 100.0, 0)) == 5
    assert constant.times(1000, 0.5, 0) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_a_ramp_grows_from_its_first_rate_to_its_last():
    times = OpenLoop(parse_rates("10-100"), "constant").times(None, 100.0, seed=0)

    counts, _ = np.histogram(times, bins=10, range=(0, 100))
    assert len(times) == pytest.approx(5500, rel=0.01)
    assert counts == pytest.approx([145 + 90 * place for place in range(10)], abs=2)


def test_steps_have_one_rate_after_the_other():
    times = OpenLoop(parse_rates("10,20,40"), "constant").times(None, 30.0, seed=0)

    counts, _ = np.histogram(times, bins=3, range=(0, 30))
    assert counts == pytest.approx([100, 200, 400], abs=1)


def test_steps_without_a_duration_take_as_long_as_their_requests():
    times = OpenLoop(parse_rates("10,30"), "constant").times(400, None, seed=0)

    assert len(times) == pytest.approx(400, abs=1)
    assert times[-1] == pytest.approx(20.0, rel=0.01)


@pytest.mark.parametrize("rates", ["10-100", "10,20,40"])
@pytest.mark.parametrize("seed", range(4))
def test_a_ramp_or_steps_have_as_many_requests_as_were_asked_for(rates: str, seed: int):
    times = OpenLoop(parse_rates(rates), "poisson").times(200, None, seed)

    assert len(times) == 200 and (np.diff(times) > 0).all()


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "10-", "0-10", "1,,2", "inf", "nan", "1-2-3"])
def test_what_is_no_rate_is_refused(text: str):
    with pytest.raises(LoadTestError, match="rate"):
        parse_rates(text)


def test_a_trace_is_replayed_at_its_times_from_its_beginning_and_scaled():
    assert Replay().times((2.0, 2.5, 4.0), None).tolist() == [0.0, 0.5, 2.0]
    assert Replay(2.0).times((2.0, 2.5, 4.0), None).tolist() == [0.0, 0.25, 1.0]
    assert Replay().times((2.0, 2.5, 4.0), 1.0).tolist() == [0.0, 0.5]
    assert Replay().times((2.0, 2.5, 4.0), 0.5).tolist() == [0.0]  # a time at the end is not due


def test_a_trace_without_times_is_refused():
    with pytest.raises(LoadTestError, match="no times to replay; give each line an `at`"):
        Replay().times((), None)


def test_more_requests_than_memory_are_refused():
    with pytest.raises(LoadTestError, match="more than 100,000,000 requests"):
        OpenLoop(Rates((1e6,))).times(None, 1e4, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_requests": None}, "the test has no end; give a number of requests or a duration"),
        ({"cooldown": 1.0}, r"cooldown \(1.0\) counts from the end of a duration"),
        ({"duration": 3.0, "warmup": 2.0, "cooldown": 1.0}, "must leave something of the duration"),
        ({"num_processes": 3}, r"concurrency \(2\) must be at least num_processes \(3\)"),
    ],
)
def test_impossible_configuration_is_refused(change: dict[str, object], message: str):
    with pytest.raises(LoadTestError, match=message):
        LoadConfig("a:1", "m", **{"arrival": ClosedLoop(2), "num_requests": 5, **change})
