"""Results of a comparison: medians, ratios of each round, agreement; as Markdown and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from loadtest.lab.peers.comparison import Agreement, Comparison, Run
from loadtest.lab.peers.works import Work
from loadtest.result_file import write_atomically

_LEAST_AGREEMENT = 0.98  # share of outputs: two logits may be as near as float32 rounds


class Compared(Protocol):
    """The fields that comparisons of workers and of servers share."""

    @property
    def agreements(self) -> tuple[Agreement, ...]: ...
    @property
    def missing(self) -> Mapping[str, str]: ...
    @property
    def versions(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Line:
    """One engine at one concurrency: medians over the rounds."""

    engine: str
    against: str | None
    concurrency: int
    tokens_per_second: float  # new ones, over the time of the whole work
    decode_tokens_per_second: float | None  # all but the first, over the time beyond prompts
    prefill_tokens_per_second: float
    ratio: float | None  # its time over ours, of the same round
    least_ratio: float | None
    largest_ratio: float | None
    decode_ratio: float | None


@dataclass(frozen=True)
class Origin:
    """The work of a comparison, and the origin of its figures."""

    work: Work
    command: str
    commit: str  # our code's
    started_at: str
    machine: str
    num_threads: int


@dataclass(frozen=True)
class Results(Origin):
    """Everything there is to keep of a comparison."""

    lines: tuple[Line, ...]
    disagreements: tuple[str, ...]  # between engines that must agree
    comparison: Comparison


def summarize(work: Work, comparison: Comparison) -> tuple[Line, ...]:
    """Return a line for every engine and concurrency."""
    return tuple(
        _line(work, engine.name, engine.against, concurrency, comparison.runs)
        for concurrency in dict.fromkeys(run.concurrency for run in comparison.runs)
        for engine in work.engines
        if _runs(comparison.runs, engine.name, concurrency)
    )


def disagreements(agreements: Iterable[Agreement]) -> tuple[str, ...]:
    """Say of every engine that must agree and does not how far it does."""
    return tuple(
        f"{a.engine} at concurrency {a.concurrency}: {a.equal} of {a.compared} outputs are those "
        f"of {a.against}"
        for a in agreements
        if a.must_agree and a.equal < _LEAST_AGREEMENT * a.compared
    )


def write(results: Results, directory: Path) -> list[Path]:
    """Write the table and everything that was measured; return the files."""
    document = TypeAdapter(Results).dump_json(results, indent=1)
    return write_files(results.work.name, document, to_markdown(results), directory)


def write_files(name: str, document: bytes, table: str, directory: Path) -> list[Path]:
    """Write a document of JSON and a table; return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    json_file, markdown = (directory / f"{name}.{kind}" for kind in ("json", "md"))
    write_atomically(json_file, document + b"\n")
    write_atomically(markdown, table.encode())
    return [json_file, markdown]


def to_markdown(results: Results) -> str:
    """Return the table with what a reader must know of it."""
    comparison = results.comparison
    num_rounds = len({run.round for run in comparison.runs})
    parts = [
        "Random weights, the same for all engines; random prompts. Medians of "
        f"{num_rounds} rounds in which the engines took turns; a ratio is a peer's time over ours "
        "in the same round: above 1 we are faster. Decode: without the time of the prompts alone.",
        _table(results.lines),
    ]
    end = end_of_table(comparison, results.disagreements, results)
    return paragraphs(title(results.work), *parts, *end)


def paragraphs(*parts: str) -> str:
    """Return what is not empty, with blank lines between."""
    return "\n\n".join(part for part in parts if part) + "\n"


def title(work: Work) -> str:
    """Return the heading of a table."""
    kind = f"beam {work.num_beams}" if work.num_beams > 1 else "greedy"
    return f"# {work.name}: {work.num_prompt_tokens} -> {work.num_new_tokens} tokens, {kind}"


def end_of_table(
    comparison: Compared, disagreements: Iterable[str], origin: Origin
) -> tuple[str, ...]:
    """Return what stands below a table: agreement, what is missing, where the figures are from."""
    versions = sorted(comparison.versions.items())
    return (
        _agreement_table(comparison.agreements),
        "\n".join(f"- DISAGREES: {text}" for text in disagreements),
        "\n".join(f"- without {name}: {why}" for name, why in comparison.missing.items()),
        f"- machine: {origin.machine}, {origin.num_threads} threads\n"
        f"- started: {origin.started_at}\n- commit: {origin.commit}\n"
        f"- command: `{origin.command}`\n- versions: "
        + ", ".join(f"{name} {number}" for name, number in versions),
    )


def _line(
    work: Work, engine: str, against: str | None, concurrency: int, all_runs: Sequence[Run]
) -> Line:
    runs = _runs(all_runs, engine, concurrency)
    ours = {run.round: run for run in _runs(all_runs, against, concurrency)}
    ratios = [run.seconds / ours[run.round].seconds for run in runs if run.round in ours]
    decode_ratios = [
        _decode(run) / _decode(ours[run.round])
        for run in runs
        if run.round in ours and _decode(run) > 0 and _decode(ours[run.round]) > 0
    ]
    decode = statistics.median(_decode(run) for run in runs)
    num_decoded = concurrency * (work.num_new_tokens - 1)
    return Line(
        engine=engine,
        against=against,
        concurrency=concurrency,
        tokens_per_second=concurrency * work.num_new_tokens / _median(r.seconds for r in runs),
        decode_tokens_per_second=num_decoded / decode if num_decoded and decode > 0 else None,
        prefill_tokens_per_second=concurrency
        * work.num_prompt_tokens
        / _median(r.prompt_seconds for r in runs),
        ratio=statistics.median(ratios) if ratios else None,
        least_ratio=min(ratios, default=None),
        largest_ratio=max(ratios, default=None),
        decode_ratio=statistics.median(decode_ratios) if decode_ratios else None,
    )


def _runs(runs: Sequence[Run], engine: str | None, concurrency: int) -> list[Run]:
    return [run for run in runs if run.engine == engine and run.concurrency == concurrency]


def _decode(run: Run) -> float:
    return run.seconds - run.prompt_seconds


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _table(lines: Sequence[Line]) -> str:
    head = (
        "| at once | engine | tokens/s | decode tokens/s | prefill tokens/s | against "
        "| ratio (least - largest) | decode ratio |\n|---|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(
        f"| {line.concurrency} | {line.engine} | {line.tokens_per_second:.1f} "
        f"| {_number(line.decode_tokens_per_second, '.1f')} "
        f"| {line.prefill_tokens_per_second:.0f} | {line.against or ''} | {_ratio(line)} "
        f"| {_number(line.decode_ratio, '.2f')} |"
        for line in lines
    )


def _ratio(line: Line) -> str:
    if line.ratio is None or line.least_ratio is None or line.largest_ratio is None:
        return ""
    return f"{line.ratio:.2f} ({line.least_ratio:.2f} - {line.largest_ratio:.2f})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _agreement_table(agreements: Sequence[Agreement]) -> str:
    if not agreements:
        return ""
    head = "| at once | engine | outputs equal to those of | must |\n|---|---|---|---|\n"
    return head + "\n".join(
        f"| {a.concurrency} | {a.engine} | {a.against}: {a.equal} of {a.compared} "
        f"| {'yes' if a.must_agree else 'no'} |"
        for a in agreements
    )
