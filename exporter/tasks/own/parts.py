"""Divides a person's examples into those to learn from and those to judge by."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from engine.errors import ConfigError

Row = TypeVar("Row")

_LEAST = 10  # examples of a part; fewer say nothing
_ENOUGH = 400  # in all, of which a twentieth, by a hash, is that many almost surely
_ENOUGH_GIVEN = 40  # likewise, of those that a person gives for two parts
_MOST_HELD_OUT = 2000  # enough for a percent of a percent


class Parts(NamedTuple, Generic[Row]):
    """The parts; no example, by its key, is in two."""

    training: list[Row]
    validation: list[Row]  # chooses the best checkpoint
    held_out: list[Row]  # judged once, at the end

    def __str__(self) -> str:
        return (
            f"{len(self.training):,} examples to learn from, {len(self.validation):,} to choose "
            f"the best checkpoint by, {len(self.held_out):,} held out"
        )


def divide(
    rows: Sequence[Row],
    key: Callable[[Row], str],
    validation: Sequence[Row] | None = None,
) -> Parts[Row]:
    """Divide rows by a hash of their key, so that more data moves no old row to another part.

    A tenth is held out and a twentieth chooses the checkpoint. With `validation`, rows that the
    person gave, half of these do the one and half the other, and what is also in them is not
    learned from. Raises ConfigError where a part is too small to say anything.
    """
    if validation is None:
        parts = Parts[Row]([], [], [])
        for row in rows:
            share = zlib.crc32(key(row).encode()) % 20
            parts[2 if share < 2 else 1 if share == 2 else 0].append(row)
    else:
        kept = {key(row) for row in validation}
        training = [row for row in rows if key(row) not in kept]
        halves = [zlib.crc32(key(row).encode()) % 2 for row in validation]
        parts = Parts(
            training,
            [row for row, half in zip(validation, halves, strict=True) if half],
            [row for row, half in zip(validation, halves, strict=True) if not half],
        )
    num_different = len({key(row) for part in parts for row in part})
    _check(parts, num_different, is_given=validation is not None)
    return Parts(parts.training, parts.validation[:_MOST_HELD_OUT], parts.held_out[:_MOST_HELD_OUT])


def _check(parts: Parts[Row], num_different: int, *, is_given: bool) -> None:
    total = sum(map(len, parts))
    alike = "" if num_different == total else f", of which {num_different} differ,"
    way_out = f"give about {_ENOUGH} in all, or others to judge by (--valid)"
    if is_given:
        way_out = f"give about {_ENOUGH_GIVEN} to judge by, and other examples to learn from"
    for name, part in zip(("to learn from", "for validation", "held out"), parts, strict=True):
        if len(part) < _LEAST:
            raise ConfigError(
                f"{len(part)} of {total} examples{alike} are {name}, at least {_LEAST} are needed: "
                f"{way_out}"
            )
