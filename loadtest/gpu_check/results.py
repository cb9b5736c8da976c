"""Results as JSON and as a table, written anew after every part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from loadtest.gpu_check.part import Found, Result, Status
from loadtest.result_file import write_atomically, write_document

JSON_NAME, TABLE_NAME = "results.json", "table.txt"

_STYLES: Mapping[Status, str] = {
    "passed": "green",
    "measured": "cyan",
    "not run": "yellow",
    "failed": "bold red",
    "crashed": "bold red",
    "timed out": "bold red",
}
WIDTH = 150  # tables that are not in a terminal
_NO_LIMIT = 10_000
_LEAST_SUMMARY = 16  # columns of a terminal
_SUMMARY = 400  # characters of a summary in the table; the JSON has all


@dataclass(frozen=True)
class Origin:
    """The origin of the results."""

    command: str
    commit: str
    started_at: str
    machine: str
    settings: Found
    is_emulated: bool  # the device computes nothing, so that no number means anything


def write(origin: Origin, results: Sequence[Result], out: Path) -> None:
    """Write both files, each all or nothing."""
    content = {
        **asdict(origin),
        "counts": counts(results),
        "parts": [asdict(result) for result in results],
    }
    write_document(content, out / JSON_NAME)
    text = StringIO()
    print_tables(origin, results, Console(file=text, width=WIDTH))
    write_atomically(out / TABLE_NAME, text.getvalue().encode())


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Return how many parts there are of each status."""
    return {status: sum(r.status == status for r in results) for status in _STYLES}


def print_tables(origin: Origin, results: Sequence[Result], console: Console) -> None:
    """Print a line for every part, then the tables that parts have in what they found."""
    if origin.is_emulated:
        console.print(
            "The device is emulated: kernels do nothing, certificates must fail, and no time or "
            "ratio means anything.",
            style="bold yellow",
        )
    _print(_overview(results), console)
    for result in results:
        for title, rows in result.found.get("tables", {}).items():
            _print(_table(f"{result.name}: {title}", rows), console)


def _print(table: Table, console: Console) -> None:
    """Print a table, or, where it would be cut, a line for each of its rows."""
    needed = Measurement.get(console, console.options.update(width=_NO_LIMIT), table).minimum
    if needed <= console.width:
        console.print(table)
        return
    console.print(table.title, style="bold")
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        named = zip(table.columns, cells, strict=True)
        shown = (f"{column.header}: {cell}" for column, cell in named if str(cell))
        console.print("; ".join(shown), markup=False)


def _overview(results: Sequence[Result]) -> Table:
    found = ", ".join(f"{count} {status}" for status, count in counts(results).items() if count)
    table = Table(title=f"Parts: {found or 'none yet'}", title_justify="left")
    table.add_column("part", style="bold", no_wrap=True)
    table.add_column("status")
    table.add_column("s", justify="right")
    table.add_column("what was found", min_width=_LEAST_SUMMARY)
    for result in results:
        table.add_row(
            result.name,
            Text(result.status, style=_STYLES[result.status]),
            f"{result.seconds:.0f}",
            Text(result.summary[:_SUMMARY]),  # as it is: it may have brackets in it
        )
    return table


def _table(title: str, rows: Sequence[Mapping[str, object]]) -> Table:
    """Return a table of rows with the same columns."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(rows[0] if rows else ()):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: object) -> Text:
    if isinstance(value, float):
        return Text(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}")
    return Text("" if value is None else str(value))
