"""Compares two load tests: ratios with intervals, and what they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from pydantic import TypeAdapter, ValidationError

from loadtest.errors import LoadTestError
from loadtest.load_report import LoadReport
from loadtest.metrics import RequestRecord, due_in

Verdict = Literal["better", "worse", "no difference shown"]
_Values = np.ndarray[tuple[int], np.dtype[np.float64]]
_Statistic = Callable[[np.ndarray[Any, np.dtype[np.float64]]], _Values]  # along the last axis

_RESAMPLES = 2000
_MAX_TOGETHER = 2_000_000  # values that are resampled at a time
_FEW_SPANS = 5  # seconds, below which a rate is not compared
_FEW = 100  # requests, below which a 99th percentile is one request's
_NOT_COMPARED = ("address", "keep_answers", "verify")  # settings that may differ


@dataclass(frozen=True)
class Line:
    """One figure of both tests."""

    name: str
    first: float  # seconds, requests a second, or a share of the requests
    second: float
    ratio: float  # second / first
    low: float  # the ratio's interval
    high: float
    verdict: Verdict  # on the second


@dataclass(frozen=True)
class Comparison:
    """The comparison of two load tests."""

    lines: tuple[Line, ...]
    confidence: float  # for all intervals together
    doubts: tuple[str, ...]  # why the two may not be comparable

    @property
    def worse(self) -> tuple[str, ...]:
        """The figures in which the second is shown to be worse."""
        return tuple(line.name for line in self.lines if line.verdict == "worse")

    @property
    def verdict(self) -> str:
        """The whole in one line."""
        better = tuple(line.name for line in self.lines if line.verdict == "better")
        parts = [f"worse: {', '.join(self.worse)}"] if self.worse else []
        parts += [f"better: {', '.join(better)}"] if better else []
        return f"the second is {'; '.join(parts)}" if parts else "no difference shown"


def read_report(path: Path) -> LoadReport:
    """Return a load test that --json has written; LoadTestError for anything else."""
    try:
        return TypeAdapter(LoadReport).validate_json(path.read_bytes())
    except OSError as error:
        raise LoadTestError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise LoadTestError(
            f"{path} is not a load test of this version, as `tokenweir loadtest --json` writes it: "
            f"{error.errors()[0]['msg']}"
        ) from error


def compare(first: LoadReport, second: LoadReport, confidence: float = 0.95) -> Comparison:
    """Return the ratios of the second to the first.

    Intervals are those of a bootstrap over blocks of requests that were due one after the other,
    since neighbours share a queue. They hold together with the confidence: each is wider
    (Bonferroni), so that many figures do not find a difference by chance. LoadTestError where one
    of the tests has no answered request.
    """
    found = [
        (name, higher_is_better, statistic, _values(first, name), _values(second, name))
        for name, higher_is_better, statistic in _FIGURES
    ]
    found = [one for one in found if len(one[3]) and len(one[4])]
    if not found:
        raise LoadTestError("one of the tests has no answered request; nothing can be compared")
    tail = (1 - confidence) / len(found) / 2
    generator = np.random.default_rng(0)
    lines = tuple(
        _line(name, is_high, statistic, a, b, tail, generator)
        for name, is_high, statistic, a, b in found
    )
    return Comparison(lines, confidence, tuple(_doubts(first, second)))


def _percentile(percent: float) -> _Statistic:
    return lambda values: cast(_Values, np.percentile(values, percent, axis=-1))


def _mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> _Values:
    return cast(_Values, values.mean(axis=-1))


_FIGURES: tuple[tuple[str, bool, _Statistic], ...] = (
    ("answered", True, _mean),
    ("TTFT p50", False, _percentile(50)),
    ("TTFT p99", False, _percentile(99)),
    ("TPOT p50", False, _percentile(50)),
    ("TPOT p99", False, _percentile(99)),
    ("end to end p50", False, _percentile(50)),
    ("end to end p99", False, _percentile(99)),
    ("requests/s", True, _mean),
)
_MEASURES: dict[str, Callable[[RequestRecord], float | None]] = {
    "TTFT": lambda record: record.time_to_first_token,
    "TPOT": lambda record: record.time_per_output_token,
    "end to end": lambda record: record.end_to_end,
}


def _values(report: LoadReport, name: str) -> _Values:
    """Return what a figure is computed of, in the order of time."""
    if name == "requests/s":
        return _ended_a_second(report)
    due = sorted(due_in(report.records, report.window), key=lambda record: record.scheduled)
    if name == "answered":
        answered = [record.ok for record in due]
        return np.array(answered if any(answered) else [], dtype=np.float64)
    measure = _MEASURES[name.rpartition(" ")[0]]
    values = [measure(record) for record in due if record.ok]
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _ended_a_second(report: LoadReport) -> _Values:
    """Return requests answered a second, for spans of about a second of the window."""
    window = report.window
    ended = [r.finished for r in report.records if r.ok and window.has(r.finished)]
    num_spans = round(window.duration)
    if num_spans < _FEW_SPANS or not ended:  # their spread says nothing
        return np.array([], dtype=np.float64)
    counts, _ = np.histogram(ended, bins=num_spans, range=(window.start, window.end))
    return counts / (window.duration / num_spans)


def _line(
    name: str,
    higher_is_better: bool,
    statistic: _Statistic,
    first: _Values,
    second: _Values,
    tail: float,
    generator: np.random.Generator,
) -> Line:
    a, b = float(statistic(first)), float(statistic(second))
    of_a = _resampled(first, statistic, generator)
    of_b = _resampled(second, statistic, generator)
    ratios = of_b / np.maximum(of_a, 1e-12)
    low, high = np.quantile(ratios, [tail, 1 - tail]).tolist()
    verdict: Verdict = "no difference shown"
    if low > 1 or high < 1:
        verdict = "better" if (low > 1) == higher_is_better else "worse"
    return Line(name, a, b, b / max(a, 1e-12), low, high, verdict)


def _resampled(values: _Values, statistic: _Statistic, generator: np.random.Generator) -> _Values:
    """Return the statistic of many resamples, each of blocks of n^(1/3) neighbours."""
    number = len(values)
    length = math.ceil(number ** (1 / 3))
    within = np.arange(length)
    found: list[_Values] = []
    together = max(1, min(_RESAMPLES, _MAX_TOGETHER // number))
    for start in range(0, _RESAMPLES, together):
        count = min(together, _RESAMPLES - start)
        starts = generator.integers(0, number, (count, math.ceil(number / length)))
        indices = (starts[..., None] + within).reshape(count, -1)[:, :number] % number
        found.append(statistic(values[indices]))
    return np.concatenate(found)


def _doubts(first: LoadReport, second: LoadReport) -> Sequence[str]:
    """Return why a difference may be one of the tests and not of the servers."""
    found = [
        f"{field.name} differs: {getattr(first.config, field.name)} and "
        f"{getattr(second.config, field.name)}"
        for field in fields(first.config)
        if field.name not in _NOT_COMPARED
        and getattr(first.config, field.name) != getattr(second.config, field.name)
    ]
    for name in ("work", "machine"):
        a, b = getattr(first, name), getattr(second, name)
        if a != b:
            found.append(f"{name} differs: {a} and {b}")
    for place, report in (("first", first), ("second", second)):
        if report.num_failed:
            found.append(f"{report.num_failed} requests of the {place} failed")
        if report.interrupted:
            found.append(f"the {place} was interrupted")
        if report.summary.num_ok < _FEW:
            found.append(f"the {place} has {report.summary.num_ok} answers, which are few")
        found += [f"the {place} is not valid: {reason}" for reason in report.invalid]
    return found
