"""Results of a comparison: medians, ratios of each round, agreement."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.lab.peers.comparison import Agreement, Comparison, Run
from loadtest.lab.peers.works import Work
from loadtest.lab.turns import Ratio, ratio_of

_LEAST_AGREEMENT = 0.98  # share of outputs: two logits may be as near as float32 rounds


@dataclass(frozen=True)
class Line:
    """One engine at one concurrency: medians over the rounds, in seconds.

    A ratio is a peer's time over ours in the same round: above 1 we are faster.
    """

    engine: str
    against: str | None
    concurrency: int
    tokens_per_second: float  # new ones, over the time of the whole work
    first_token: float
    first_token_p99: float | None
    output_token: float | None  # each behind the first
    ratio: Ratio | None  # in the time of the whole work
    first_token_ratio: Ratio | None
    output_token_ratio: Ratio | None
    num_runs: int
    num_late: int  # runs in which the load test was late


def summarize(work: Work, comparison: Comparison) -> tuple[Line, ...]:
    """Return a line for every engine and concurrency."""
    runs: dict[tuple[str | None, int], dict[int, Run]] = {}
    for run in comparison.runs:
        runs.setdefault((run.engine, run.concurrency), {})[run.round] = run
    return tuple(
        _line(engine.name, engine.against, own, runs.get((engine.against, concurrency), {}))
        for concurrency in dict.fromkeys(run.concurrency for run in comparison.runs)
        for engine in work.engines
        if (own := runs.get((engine.name, concurrency)))
    )


def disagreements(agreements: Iterable[Agreement]) -> tuple[str, ...]:
    """Return a line for every engine that must agree and does not."""
    return tuple(
        f"{a.engine} at concurrency {a.concurrency}: {a.equal} of {a.compared} outputs are those "
        f"of {a.against}"
        for a in agreements
        if a.must_agree and a.equal < _LEAST_AGREEMENT * a.compared
    )


def told(line: Line) -> str:
    """Return the most important of it in a line."""
    ratio = f", {line.ratio} of the time of {line.against}" if line.ratio else ""
    late = f"; the load test was late in {line.num_late} of {line.num_runs} runs"
    return (
        f"{line.engine} at {line.concurrency}: {line.tokens_per_second:,.1f} tokens/s{ratio}"
        f"{late if line.num_late else ''}"
    )


def _line(
    engine: str, against: str | None, by_round: Mapping[int, Run], ours: Mapping[int, Run]
) -> Line:
    runs = [*by_round.values()]
    pairs = [(run, ours[number]) for number, run in by_round.items() if number in ours]
    return Line(
        engine=engine,
        against=against,
        concurrency=runs[0].concurrency,
        tokens_per_second=statistics.median(run.tokens_per_second for run in runs),
        first_token=statistics.median(run.first_token for run in runs),
        first_token_p99=_median(run.first_token_p99 for run in runs),
        output_token=_median(run.output_token for run in runs),
        ratio=_ratio(pairs, lambda run: run.seconds),
        first_token_ratio=_ratio(pairs, lambda run: run.first_token),
        output_token_ratio=_ratio(pairs, lambda run: run.output_token),
        num_runs=len(runs),
        num_late=sum(bool(run.late) for run in runs),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(
    pairs: Sequence[tuple[Run, Run]], time_of: Callable[[Run], float | None]
) -> Ratio | None:
    """Return theirs over ours, of the rounds in which both took time."""
    times = [(time_of(run), time_of(ours)) for run, ours in pairs]
    known = [(a, b) for a, b in times if a is not None and b is not None and a > 0 and b > 0]
    return ratio_of(*zip(*known, strict=True)) if known else None
