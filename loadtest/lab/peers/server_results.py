"""Results of a comparison of servers: medians and ratios of each round; as Markdown and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from loadtest.lab.peers.results import Origin, end_of_table, paragraphs, title, write_files
from loadtest.lab.peers.server_comparison import ServerComparison, ServerRun
from loadtest.lab.peers.works import Work
from loadtest.metrics import Distribution

Measure = Callable[[ServerRun], float]
_HEAD = """\
| at once | server | tokens/s | TTFT p50, p99 ms | TPOT p50 ms | against | tokens/s, times \
(least - largest) | TTFT, times | TPOT, times |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Ratio:
    """A peer's time over ours, of each round: above 1 we are faster."""

    median: float
    least: float
    largest: float


@dataclass(frozen=True)
class ServerLine:
    """One server at one concurrency: medians over the rounds, in seconds."""

    engine: str
    against: str | None
    concurrency: int
    tokens_per_second: float
    time_to_first_token: float  # p50
    time_to_first_token_p99: float
    time_per_output_token: float  # p50
    ratio: Ratio | None  # in the time for the same tokens
    first_token_ratio: Ratio | None  # in p50, as is the next
    output_token_ratio: Ratio | None
    num_runs: int
    num_late: int  # runs in which the load test was late


@dataclass(frozen=True)
class ServerResults(Origin):
    """Everything there is to keep of a comparison of servers."""

    lines: tuple[ServerLine, ...]
    disagreements: tuple[str, ...]  # between servers that must agree
    comparison: ServerComparison


def summarize_servers(work: Work, comparison: ServerComparison) -> tuple[ServerLine, ...]:
    """Return a line for every server and concurrency."""
    return tuple(
        _line(engine.name, engine.against, runs, _runs(comparison, engine.against, concurrency))
        for concurrency in dict.fromkeys(run.concurrency for run in comparison.runs)
        for engine in work.engines
        if (runs := _runs(comparison, engine.name, concurrency))
    )


def write_server_results(results: ServerResults, directory: Path) -> list[Path]:
    """Write the table and everything that was measured; return the files."""
    document = TypeAdapter(ServerResults).dump_json(results, indent=1)
    return write_files(results.work.name, document, to_markdown(results), directory)


def to_markdown(results: ServerResults) -> str:
    """Return the table with what a reader must know of it."""
    rounds = {run.round for run in results.comparison.runs}
    about = (
        "Random weights, the same for all servers; random prompts, which no server is asked "
        "twice; a closed loop of so many streams, sent by the load test on the same machine. "
        f"Medians of {len(rounds)} rounds in which the servers took turns, each started anew with "
        "nothing beside it; a ratio is a peer's time over ours in the same round: above 1 we are "
        "faster."
    )
    late = [line for line in results.lines if line.num_late]
    notes = "\n".join(
        f"- {line.engine} at {line.concurrency}: the load test was late in {line.num_late} of "
        f"{line.num_runs} runs"
        for line in late
    )
    table = _HEAD + "\n".join(map(_row, results.lines))
    end = end_of_table(results.comparison, results.disagreements, results)
    return paragraphs(title(results.work), about, table, notes, *end)


def _line(
    engine: str, against: str | None, runs: Sequence[ServerRun], ours: Sequence[ServerRun]
) -> ServerLine:
    return ServerLine(
        engine=engine,
        against=against,
        concurrency=runs[0].concurrency,
        tokens_per_second=_median(runs, lambda run: run.tokens_per_second),
        time_to_first_token=_median(runs, _first_token),
        time_to_first_token_p99=_median(runs, lambda run: _known(run.time_to_first_token).p99),
        time_per_output_token=_median(runs, _output_token),
        ratio=_ratio(runs, ours, lambda run: 1 / run.tokens_per_second),
        first_token_ratio=_ratio(runs, ours, _first_token),
        output_token_ratio=_ratio(runs, ours, _output_token),
        num_runs=len(runs),
        num_late=sum(bool(run.invalid) for run in runs),
    )


def _runs(comparison: ServerComparison, engine: str | None, concurrency: int) -> list[ServerRun]:
    return [
        run for run in comparison.runs if (run.engine, run.concurrency) == (engine, concurrency)
    ]


def _first_token(run: ServerRun) -> float:
    return _known(run.time_to_first_token).p50


def _output_token(run: ServerRun) -> float:
    return _known(run.time_per_output_token).p50


def _known(distribution: Distribution | None) -> Distribution:
    assert distribution is not None, "every answer has several tokens"
    return distribution


def _median(runs: Sequence[ServerRun], measure: Measure) -> float:
    return statistics.median(map(measure, runs))


def _ratio(runs: Sequence[ServerRun], ours: Sequence[ServerRun], measure: Measure) -> Ratio | None:
    of_ours = {run.round: measure(run) for run in ours}
    found = [measure(run) / of_ours[run.round] for run in runs if run.round in of_ours]
    return Ratio(statistics.median(found), min(found), max(found)) if found else None


def _row(line: ServerLine) -> str:
    ratio = line.ratio
    spread = f"{ratio.median:.2f} ({ratio.least:.2f} - {ratio.largest:.2f})" if ratio else ""
    first, later = line.first_token_ratio, line.output_token_ratio
    return (
        f"| {line.concurrency} | {line.engine} | {line.tokens_per_second:.1f} "
        f"| {line.time_to_first_token * 1e3:.0f}, {line.time_to_first_token_p99 * 1e3:.0f} "
        f"| {line.time_per_output_token * 1e3:.1f} | {line.against or ''} | {spread} "
        f"| {f'{first.median:.2f}' if first else ''} | {f'{later.median:.2f}' if later else ''} |"
    )
