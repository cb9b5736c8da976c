"""The table of families in exporter/README.md: python -m exporter.huggingface.table prints it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from exporter.graphs.target import TARGETS
from exporter.huggingface.families import FAMILIES
from exporter.huggingface.family import Ability, Family


def family_table(
    families: Sequence[Family] = FAMILIES, heads: Sequence[str] = ("family", "`model_type`")
) -> str:
    """Return what every family can do and where, a line each, as Markdown."""
    heads = (*heads, *get_args(Ability), "targets")
    rows = [heads, tuple("---" for _ in heads), *map(_row, families)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(family: Family) -> tuple[str, ...]:
    types = ", ".join(f"`{name}`" for name in family.model_types)
    abilities = ("yes" if ability in family.abilities else "" for ability in get_args(Ability))
    return family.title, types, *abilities, ", ".join(TARGETS)  # all families go to all of them


if __name__ == "__main__":
    print(family_table())
