"""The table of families in exporter/README.md: python -m exporter.huggingface.table prints it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from exporter.graphs.target import TARGETS
from exporter.huggingface.any_decoder import TITLE
from exporter.huggingface.families import FAMILIES
from exporter.huggingface.family import WRITES, Ability, Family


def family_table(
    families: Sequence[Family] = FAMILIES, heads: Sequence[str] = ("family", "`model_type`")
) -> str:
    """Return what every family can do and where, a line each, as Markdown."""
    heads = (*heads, *get_args(Ability), "targets")
    rows = [heads, tuple("---" for _ in heads)]
    rows += [
        _row(one.title, map("`{}`".format, one.model_types), one.abilities) for one in families
    ]
    if families is FAMILIES:
        rows.append(_row(TITLE, ["any other"], WRITES))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(title: str, types: Iterable[str], found: Sequence[Ability]) -> tuple[str, ...]:
    abilities = ("yes" if ability in found else "" for ability in get_args(Ability))
    return title, ", ".join(types), *abilities, ", ".join(TARGETS)  # all families go to all of them


if __name__ == "__main__":
    print(family_table())
