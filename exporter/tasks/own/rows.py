"""Reads files of lines, and names the lines that are wrong with their numbers."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError
from engine.lines import read_lines

MAX_BYTES = 2**30  # each file; models of these sizes do not learn more from more
_MOST_NAMED = 8  # lines of a file that are named; the others are counted


class BadLines:
    """The wrong lines of a file, to be told at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._named: list[str] = []
        self._count = 0

    def add(self, number: int, problem: str) -> None:
        """Note that line `number`, counted from 1, has a problem."""
        self._count += 1
        if len(self._named) < _MOST_NAMED:
            self._named.append(f"line {number}: {problem}")

    def check(self, total: int) -> None:
        """Raise ConfigError if there were any among `total` lines."""
        if not self._count:
            return
        more = self._count - len(self._named)
        others = f"; and {more:,} more" if more else ""
        raise ConfigError(
            f"{self._path}: {self._count:,} of {total:,} lines are wrong: "
            f"{'; '.join(self._named)}{others}; correct or remove them"
        )


def read_columns(path: Path, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the rows of a file whose columns, apart by tabs, are `names`.

    A first line that says these names is not a row; empty lines are skipped. Raises ConfigError
    that names the lines with another number of columns, or an empty one.
    """
    lines = read_lines(path, MAX_BYTES)
    bad, rows = BadLines(path), []
    for number, line in enumerate(lines, start=1):
        fields = tuple(field.strip() for field in line.split("\t"))
        is_header = number == 1 and tuple(field.lower() for field in fields) == names
        if is_header or not line.strip():
            continue
        if len(fields) != len(names):
            bad.add(number, f"{len(fields)} columns, wanted {len(names)} ({', '.join(names)})")
        elif not all(fields):
            bad.add(number, f"{names[fields.index('')]} is empty")
        else:
            rows.append(fields)
    bad.check(len(lines))
    return rows
