"""Two load tests held against each other."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from loadtest.arrival.arrival import OpenLoop
from loadtest.arrival.rates import Rates
from loadtest.comparison import compare, read_report
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.load_report import LoadReport
from loadtest.metrics import RequestRecord, summarize, window_of
from loadtest.reports.report import write_json


def drawn(seed: int, scale: float = 1.0, count: int = 400) -> LoadReport:
    """A test at 20 requests a second whose latencies are drawn around a tenth of a second."""
    latencies = np.random.default_rng(seed).lognormal(np.log(0.1 * scale), 0.3, count)
    records = tuple(
        RequestRecord(
            index,
            0,
            index / 20,
            index / 20,
            index / 20 + e2e,
            "OK",
            token_times=(index / 20 + e2e / 2, index / 20 + e2e),
            first_tokens=1,
            output_tokens=2,
        )
        for index, e2e in enumerate(latencies.tolist())
    )
    return LoadReport(
        config=LoadConfig("a:1", "m", OpenLoop(Rates((20.0,)), "constant"), count),
        work="w",
        num_different=1,
        method="generate",
        started_at=datetime(2026, 1, 2, tzinfo=UTC),
        versions={},
        window=window_of(records),
        summary=summarize(records),
        records=records,
    )


def test_a_slower_server_is_worse_in_its_latencies_and_its_ratio_is_in_the_interval():
    found = compare(drawn(0), drawn(1, scale=1.3))

    worse = {line.name: line for line in found.lines if line.verdict == "worse"}
    assert {"TTFT p50", "TPOT p50", "end to end p50"} <= set(worse)
    assert worse["end to end p50"].low < 1.3 < worse["end to end p50"].high
    assert "requests/s" not in worse
    assert found.verdict.startswith("the second is worse: ")


def test_a_faster_server_is_better():
    found = compare(drawn(0), drawn(1, scale=0.7))

    assert found.worse == () and "better: TTFT p50" in found.verdict


def test_a_server_that_answers_fewer_requests_is_worse_however_fast_it_is():
    other = drawn(1, scale=0.7)
    records = (
        replace(record, status="UNAVAILABLE") if record.index % 4 == 0 else record
        for record in other.records
    )

    found = compare(drawn(0), replace(other, records=tuple(records)))

    assert "answered" in found.worse
    (line,) = (one for one in found.lines if one.name == "answered")
    assert (line.first, line.second) == (1.0, 0.75)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_server_twice_shows_no_difference(seed: int):
    found = compare(drawn(seed), drawn(seed + 100))

    assert found.verdict == "no difference shown"
    assert found.doubts == ()


def test_what_may_not_be_compared_is_told():
    other = replace(drawn(1), work="v", interrupted=True, invalid=("the client was late",))
    other = replace(other, config=replace(other.config, seed=3, address="b:2", verify=0.5))

    doubts = compare(drawn(0, count=50), other).doubts

    assert "seed differs: 0 and 3" in doubts and "work differs: w and v" in doubts
    assert "the second was interrupted" in doubts
    assert "the second is not valid: the client was late" in doubts
    assert "the first has 50 answers, which are few" in doubts
    assert not any("address" in doubt or "verify" in doubt for doubt in doubts)


def test_a_test_without_answers_cannot_be_compared():
    with pytest.raises(LoadTestError, match="no answered request"):
        compare(drawn(0), replace(drawn(1), records=()))


def test_a_file_that_is_no_load_test_is_refused(tmp_path: Path):
    (tmp_path / "x.json").write_text('{"command": "tokenweir bench"}')
    write_json(drawn(0), tmp_path / "run.json")

    assert read_report(tmp_path / "run.json") == drawn(0)
    with pytest.raises(LoadTestError, match="x.json is not a load test of this version"):
        read_report(tmp_path / "x.json")
    with pytest.raises(LoadTestError, match="cannot read"):
        read_report(tmp_path / "nowhere.json")
