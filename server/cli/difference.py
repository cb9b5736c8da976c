"""The command that compares two models on a person's own lines: diff."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree

import click

from server.cli.exit_codes import FAILED, CommandError
from server.cli.extras import needs
from server.cli.interruption import cleaned_up
from server.cli.options import Number, any_path, examples, existing_directory, existing_file

if TYPE_CHECKING:
    from exporter.difference.difference import Difference, First, OfSide

_SUITE = "tokenweir diff"


class Bound(NamedTuple):
    """A loss, and how large it may be."""

    name: str
    found: float
    allowed: float

    @property
    def is_kept(self) -> bool:
        """Whether the loss is within the bound."""
        return self.found <= self.allowed

    def __str__(self) -> str:
        word = "at most" if self.is_kept else "more than"
        return f"{self.name} {self.found:.4g}, {word} {self.allowed:g}"


@click.command(
    "diff",
    short_help="Compare two packages, or a package and a checkpoint.",
    epilog=examples(
        "tokenweir diff packages/dates packages/dates-int8 --text lines.txt",
        "tokenweir diff checkpoints/dates packages/dates-int8 --max-token-loss 0.01",
    ),
)
@click.argument("one", metavar="A", type=existing_directory)
@click.argument("other", metavar="B", type=existing_directory)
@click.option(
    "--text",
    type=existing_file,
    help="A prompt or source a line, behind a tab a reference.  [default: random tokens]",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Most that are written behind a line.",
)
@click.option(
    "--max-token-loss",
    type=Number(min=0, max=1),
    default=0.0,
    show_default=True,
    help="Tokens of A that B may write otherwise, as a share.",
)
@click.option(
    "--max-chrf-loss",
    type=Number(min=0, max=100),
    help="Points of chrF that B may lose: to references, else to what A writes.",
)
@click.option("--json", "json_path", type=any_path, help="Write all that was found as JSON.")
@click.option("--markdown", type=any_path, help="Write the table in Markdown.")
@click.option("--junit", type=any_path, help="Write the bounds as test cases of JUnit.")
@needs("export")
def diff(
    one: Path,
    other: Path,
    text: Path | None,
    new_tokens: int,
    max_token_loss: float,
    max_chrf_loss: float | None,
    **files: Path | None,
) -> None:
    """Compare what B gives with what A gives, on the CPU: packages or checkpoints of one model.

    Both write behind every line, each time the likeliest token. B is also asked what it would
    write in the place of every token of A. The command fails where B loses more than the bounds
    allow.
    """
    from exporter.difference.difference import compare
    from server.cli.progress import show_progress

    with cleaned_up(), show_progress("Comparing") as progress:
        found = compare(one, other, text, new_tokens, progress)
    bounds = [Bound("token loss", found.token_loss, max_token_loss)]
    if max_chrf_loss is not None:
        bounds.append(Bound("chrF loss", found.chrf_loss, max_chrf_loss))
    rows = list(_rows(found))
    _write(files["json_path"], _as_json(found, bounds))
    _write(files["markdown"], _as_markdown(rows, bounds))
    _write(files["junit"], _as_junit(bounds))
    _print(rows, found.first, bounds)
    missed = [bound for bound in bounds if not bound.is_kept]
    if missed:
        raise CommandError(f"{other} loses more than is allowed: {missed[0]}", FAILED)


def _write(path: Path | None, content: str) -> None:
    from exporter.files import replace_file

    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.encode())


def _rows(found: Difference) -> Iterator[tuple[str, str, str]]:
    """Yield a name, and what was found of A and of B; of both together in the last column."""
    tokens = f"{found.tokens_equal:,} of {found.tokens:,} ({1 - found.token_loss:.2%})"
    yield "tokens equal", "", tokens
    yield "lines equal", "", f"{found.lines_equal:,} of {found.lines:,}"
    quantiles = ", ".join(f"{name} {value:.2g}" for name, value in found.logit_quantiles.items())
    yield "largest logit difference", "", quantiles
    if found.chrf_between is not None:
        yield "chrF of B to A", "", f"{found.chrf_between:.1f}"
    for name, form in (
        ("perplexity", ".4f"),
        ("chrf", ".1f"),
        ("bleu", ".1f"),
        ("tokens_per_second", ",.0f"),
        ("num_bytes", ",d"),
    ):
        values = [_formatted(side, name, form) for side in (found.one, found.other)]
        if any(values):
            yield _TITLES[name], values[0], values[1]


_TITLES = {
    "perplexity": "perplexity",
    "chrf": "chrF to references",
    "bleu": "BLEU to references",
    "tokens_per_second": "tokens/s",
    "num_bytes": "bytes",
}


def _formatted(side: OfSide, name: str, form: str) -> str:
    value = getattr(side, name)
    return "" if value is None else format(value, form)


def _print(
    rows: Sequence[tuple[str, str, str]], first: First | None, bounds: Sequence[Bound]
) -> None:
    from rich.table import Table

    from server.cli.tables import print_table

    table = Table("", "A", "B")
    for row in rows:
        table.add_row(*row)
    print_table(table)
    if first is not None:
        click.echo(f"first difference: line {first.line}, token {first.token}")
        for name, text in zip("AB", first.texts, strict=True):
            click.echo(f"  {name}: {text}")
    for bound in bounds:
        click.echo(str(bound))


def _as_json(found: Difference, bounds: Sequence[Bound]) -> str:
    content = {
        **asdict(found),
        "token_loss": found.token_loss,
        "chrf_loss": found.chrf_loss,
        "bounds": [{**bound._asdict(), "is_kept": bound.is_kept} for bound in bounds],
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _as_markdown(rows: Sequence[tuple[str, str, str]], bounds: Sequence[Bound]) -> str:
    lines = ["| | A | B |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), ""]
    lines += [f"- {'kept' if bound.is_kept else '**missed**'}: {bound}" for bound in bounds]
    return "\n".join(lines) + "\n"


def _as_junit(bounds: Sequence[Bound]) -> str:
    missed = [bound for bound in bounds if not bound.is_kept]
    counts = {"tests": str(len(bounds)), "failures": str(len(missed)), "errors": "0"}
    suite = ElementTree.Element("testsuite", {"name": _SUITE, **counts})
    for bound in bounds:
        case = ElementTree.SubElement(suite, "testcase", {"classname": _SUITE, "name": bound.name})
        if not bound.is_kept:
            ElementTree.SubElement(case, "failure", {"message": str(bound)})
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
