"""Reports of `tokenweir diff`: on the terminal and in files, JSON, Markdown, JUnit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

import click
from rich.markup import escape
from rich.table import Table

from exporter.files import replace_file
from server.cli.tables import print_table

if TYPE_CHECKING:
    from exporter.compare.difference import First

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


@dataclass(frozen=True)
class Report:
    """All that was found, as people and programs read it."""

    rows: Sequence[tuple[str, str, str]]  # a name, what was found of A and of B
    first: First | None  # an empty text of it is not shown
    bounds: Sequence[Bound]
    content: Mapping[str, Any]  # for JSON

    @property
    def missed(self) -> list[Bound]:
        """The bounds that are not kept."""
        return [bound for bound in self.bounds if not bound.is_kept]

    def show(self) -> None:
        """Print it."""
        table = Table("", "A", "B")
        for row in self.rows:
            table.add_row(*map(escape, row))
        print_table(table)
        if self.first is not None:
            click.echo(f"first difference: {self.first.where}")
            for name, text in zip("AB", self.first.texts, strict=True):
                if text:
                    click.echo(f"  {name}: {text}")
        for bound in self.bounds:
            click.echo(str(bound))

    def write(self, *, json_path: Path | None, markdown: Path | None, junit: Path | None) -> None:
        """Write the files that are asked for."""
        _write(json_path, self.as_json())
        _write(markdown, self.as_markdown())
        _write(junit, self.as_junit())

    def as_json(self) -> str:
        """Return everything as JSON, which has no infinity: a perplexity of that is null."""
        from pydantic_core import to_json  # not every install has it

        bounds = [{**bound._asdict(), "is_kept": bound.is_kept} for bound in self.bounds]
        content = {**self.content, "bounds": bounds}
        return to_json(content, indent=2, inf_nan_mode="null").decode() + "\n"

    def as_markdown(self) -> str:
        """Return the table and the bounds in Markdown."""
        rows = [f"| {' | '.join(row)} |" for row in self.rows]
        kept = [f"- {'kept' if one.is_kept else '**missed**'}: {one}" for one in self.bounds]
        return "\n".join(["| | A | B |", "|---|---|---|", *rows, "", *kept]) + "\n"

    def as_junit(self) -> str:
        """Return the bounds as test cases of JUnit."""
        counts = {"tests": len(self.bounds), "failures": len(self.missed), "errors": 0}
        numbers = {name: str(count) for name, count in counts.items()}
        suite = ElementTree.Element("testsuite", {"name": _SUITE, **numbers})
        for bound in self.bounds:
            named = {"classname": _SUITE, "name": bound.name}
            case = ElementTree.SubElement(suite, "testcase", named)
            if not bound.is_kept:
                ElementTree.SubElement(case, "failure", {"message": str(bound)})
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _write(path: Path | None, content: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.encode())
