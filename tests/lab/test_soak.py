"""The study of endurance: a drift that is there is found, one that is not is not."""

from __future__ import annotations

import os
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest

from loadtest.errors import LoadTestError
from loadtest.lab.process_tree import ProcessUse
from loadtest.lab.soak import Uses, drift_of, measure_soak, parts_of
from loadtest.metrics import RequestRecord, Window
from tests.fakes.scripted_server import scripted_server, stream_messages

pytestmark = pytest.mark.long

WINDOW = Window(60.0, 1860.0)
SEEN = [(10, {"a": 1.0}), (20, {"a": 2.0}), (30, {"a": 4.0, "b": 1.0})]


def latencies(slower: float) -> list[tuple[float, float]]:
    """Return exponential ones, of which the last third is so many times as slow."""
    at = np.linspace(0, 1860, 30_000)
    took = np.random.default_rng(1).exponential(0.1, len(at))
    took[at > 1260] *= slower
    took[at < 60] *= 100  # the warm-up
    return list(zip(at.tolist(), took.tolist(), strict=True))


def test_a_server_that_stays_as_it_is_has_no_drift() -> None:
    drift = drift_of(latencies(1.0), WINDOW)

    assert drift.low < 1 < drift.high
    assert drift.high - drift.low < 0.2


def test_a_last_third_that_is_slower_is_a_drift() -> None:
    drift = drift_of(latencies(1.2), WINDOW)

    assert 1.05 < drift.low < drift.ratio < drift.high < 1.3


def test_latencies_that_hang_together_in_time_widen_the_interval() -> None:
    at = np.linspace(60, 1859, 30_000)
    alone = np.random.default_rng(1).exponential(0.1, len(at))
    minute = np.random.default_rng(2).uniform(0.5, 1.5, 31)[((at - 60) // 60).astype(int)]

    def width(values: Any) -> float:
        found = drift_of(list(zip(at.tolist(), values.tolist(), strict=True)), WINDOW)
        return found.high - found.low

    assert width(alone * minute) > 2 * width(alone)


def test_a_drift_of_hardly_any_answer_is_not_told() -> None:
    with pytest.raises(LoadTestError, match="too few answers"):
        drift_of([], WINDOW)


def test_every_part_has_its_own_requests_failures_and_uses() -> None:
    records = [
        RequestRecord(i, 0, at, sent=at, finished=at + 1, status=status, token_times=(at + 0.5,))
        for i, (at, status) in enumerate([(0.5, "OK"), (1.5, "OK"), (1.6, "X"), (2.5, "OK")])
    ]

    first, second = parts_of(records, [1.0, 2.0, 3.0], SEEN, 2)

    assert first.end_to_end is not None and first.end_to_end.count == 1
    assert first.time_to_first_token is not None and first.time_to_first_token.p99 == 0.5
    assert (first.num_failed, second.num_failed) == (1, 0)
    assert (first.memory, second.memory) == (20, 30)
    assert (first.processor_seconds, second.processor_seconds) == (0.5, 3.0)
    assert second.of_processes == {"a": 2.0, "b": 1.0}
    assert (first.busy, second.busy) == (0.5, 1.5)


def test_processes_are_read_at_the_edges_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Namespace(now=100.0)
    monkeypatch.setattr("loadtest.lab.soak.time.monotonic", lambda: clock.now)
    use = {1: ProcessUse("a", 1.0, 10), 2: ProcessUse("b", 2.0, 20)}
    monkeypatch.setattr("loadtest.lab.soak.read_tree", lambda pid: use)
    uses, numbers = Uses(1, [1.0, 2.0]), []

    for second in (0.0, 0.5, 1.0, 1.5, 2.1, 2.5):
        clock.now = 100.0 + second
        uses(Namespace())
        numbers.append(len(uses.seen))

    assert numbers == [0, 0, 1, 1, 2, 2]
    assert uses.seen[0] == (30, {"a": 1.0, "b": 2.0})


def test_a_soak_tells_every_part_of_the_time() -> None:
    with scripted_server() as server:
        server.answers["GenerateStream"] = lambda request, context: stream_messages(["a", "b"])
        soak = measure_soak(
            server.address,
            "m",
            os.getpid(),
            cores=1,
            minutes=2 / 60,
            rate=60,
            warmup=0.3,
        )

    assert sum(part.busy for part in soak.parts) > 0
    assert soak.drift.low <= soak.drift.ratio <= soak.drift.high
    assert soak.drift_of_first_token.ratio > 0
    assert (len(soak.parts), soak.errors) == (6, {})
    assert soak.parts[0].begin == pytest.approx(0.3)
    assert soak.parts[-1].end == pytest.approx(2.3)
    counts = [part.end_to_end.count for part in soak.parts if part.end_to_end]
    assert 0 < sum(counts) < 3 * 2 * soak.rate
