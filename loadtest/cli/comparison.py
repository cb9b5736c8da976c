"""The command that compares two load tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from server.cli.exit_codes import DONE, FAILED, CommandError
from server.cli.extras import needs
from server.cli.options import Number, examples, existing_file

if TYPE_CHECKING:
    from loadtest.comparison import Comparison, Line


@click.command(
    short_help="Compare two load tests, with intervals.",
    epilog=examples("tokenweir loadtest compare before.json after.json"),
)
@click.argument("first", type=existing_file)
@click.argument("second", type=existing_file)
@click.option(
    "--confidence",
    type=Number(min=0.5, max=0.999),
    default=0.95,
    show_default=True,
    help="Confidence of all intervals together.",
)
@needs("loadtest")
def compare(first: Path, second: Path, confidence: float) -> int:
    """Compare two files that --json has written; exit with 1 if the SECOND is shown to be worse."""
    from loadtest.comparison import compare as compare_reports
    from loadtest.comparison import read_report  # not every install has what they need

    found = compare_reports(read_report(first), read_report(second), confidence)
    _print(found)
    if found.worse:
        raise CommandError(f"{second} is worse than {first}: {', '.join(found.worse)}", FAILED)
    return DONE


def _print(found: Comparison) -> None:
    console = Console()
    title = f"Ratios of the second to the first, {found.confidence:.0%} intervals together"
    table = Table(title=title, title_justify="left")
    table.add_column("", style="bold")
    for column in ("first", "second", "ratio", "interval", "the second is"):
        table.add_column(column, justify="right", overflow="fold")
    for line in found.lines:
        table.add_row(
            line.name,
            *(_figure(line, value) for value in (line.first, line.second)),
            f"{line.ratio:.3f}",
            f"{line.low:.3f} {line.high:.3f}",
            line.verdict,
        )
    console.print(table)
    for doubt in found.doubts:
        console.print(f"- {doubt}", markup=False, highlight=False)
    console.print(f"- {found.verdict}", markup=False, highlight=False)


def _figure(line: Line, value: float) -> str:
    match line.name:
        case "answered":
            return f"{value:.1%}"
        case "requests/s":
            return f"{value:.1f}/s"
    return f"{value * 1000:.1f} ms"
