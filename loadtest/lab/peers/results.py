"""Results of a comparison: medians, ratios of each round, agreement; as Markdown and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.lab.peers.comparison import Agreement, Comparison, Run
from loadtest.lab.peers.works import Work
from loadtest.lab.turns import Ratio, ratio_of
from loadtest.result_file import write_atomically, write_document

_LEAST_AGREEMENT = 0.98  # share of outputs: two logits may be as near as float32 rounds
_HEAD = """\
| at once | engine | tokens/s | first token ms (p99) | ms a token behind it | against \
| time, times (least - largest) | first token, times | token, times |
|---|---|---|---|---|---|---|---|---|
"""
_ABOUT = {
    False: "Medians of {} rounds in which the engines took turns; the first token is that of the "
    "prompts alone.",
    True: "A closed loop of so many streams, sent by the load test on the same machine. Medians of "
    "{} rounds in which the servers took turns, each started anew with nothing beside it.",
}


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


@dataclass(frozen=True)
class Results:
    """Everything there is to keep of a comparison."""

    heading: Mapping[str, object]  # see loadtest.lab.result
    work: Work
    num_threads: int
    comparison: Comparison
    lines: tuple[Line, ...]
    disagreements: tuple[str, ...]  # between engines that must agree


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


def write(results: Results, directory: Path) -> list[Path]:
    """Write the table and everything that was measured; return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    json_file, markdown = (directory / f"{results.work.name}.{kind}" for kind in ("json", "md"))
    content = asdict(results)
    write_document({**content.pop("heading"), **content}, json_file)
    write_atomically(markdown, to_markdown(results).encode())
    return [json_file, markdown]


def to_markdown(results: Results) -> str:
    """Return the table with what a reader must know of it."""
    work, comparison, head = results.work, results.comparison, results.heading
    about = _ABOUT[work.are_servers].format(len({run.round for run in comparison.runs}))
    agreements = "\n".join(
        f"| {a.concurrency} | {a.engine} | {a.against}: {a.equal} of {a.compared} "
        f"| {'yes' if a.must_agree else 'no'} |"
        for a in comparison.agreements
    )
    agreement_head = "| at once | engine | outputs equal to those of | must |\n|---|---|---|---|\n"
    notes = [
        f"- {line.engine} at {line.concurrency}: the load test was late in {line.num_late} of "
        f"{line.num_runs} runs"
        for line in results.lines
        if line.num_late
    ]
    notes += [f"- DISAGREES: {text}" for text in results.disagreements]
    notes += [f"- without {name}: {why}" for name, why in comparison.missing.items()]
    versions = ", ".join(f"{name} {is_}" for name, is_ in sorted(comparison.versions.items()))
    parts = (
        f"# {title(work)}",
        "Random weights, the same for all; random prompts, which none is asked twice. "
        f"{about} A ratio is a peer's time over ours in the same round: above 1 we are faster.",
        _HEAD + "\n".join(map(_row, results.lines)),
        agreement_head + agreements if agreements else "",
        "\n".join(notes),
        f"- machine: {head['machine']}, {results.num_threads} threads\n"
        f"- started: {head['written_at']}\n- commit: {head['commit']}\n"
        f"- command: `{head['command']}`\n- versions: {versions}",
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def title(work: Work) -> str:
    """Return what was asked."""
    kind = f"beam {work.num_beams}" if work.num_beams > 1 else "greedy"
    return f"{work.name}: {work.num_prompt_tokens} -> {work.num_new_tokens} tokens, {kind}"


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


def _row(line: Line) -> str:
    p99 = f" ({line.first_token_p99 * 1e3:.0f})" if line.first_token_p99 else ""
    first, later = line.first_token_ratio, line.output_token_ratio
    return (
        f"| {line.concurrency} | {line.engine} | {line.tokens_per_second:.1f} "
        f"| {line.first_token * 1e3:.0f}{p99} "
        f"| {f'{line.output_token * 1e3:.1f}' if line.output_token else ''} "
        f"| {line.against or ''} | {line.ratio or ''} "
        f"| {f'{first.median:.2f}' if first else ''} | {f'{later.median:.2f}' if later else ''} |"
    )
