"""Which source has which row of the encoder's output, and what ended requests have left there."""

from __future__ import annotations

from collections.abc import Collection

from engine.slots.batch import RowOp

Source = tuple[str, tuple[int, ...]]  # the tenant, who alone may use it, and the tokens


class SourceTable:
    """Gives rows to sources: always the lowest free one, since a step binds all up to the last.

    The row of an ended request may keep its source for a later one that is equal; it makes way for
    others by moving to the highest free row. If there is none, the least recently used is
    evicted. The table knows no memory: every change is an operation for the cache.
    """

    def __init__(self, num_rows: int) -> None:
        self._sources: list[Source | None] = [None] * num_rows
        self._ready: set[int] = set()  # rows that are encoded and known to be sound
        self._cached: list[int] = []  # rows that no request has, by use, the latest last
        self._ops: list[RowOp] = []

    @property
    def cached(self) -> dict[int, Source]:
        """The sources in rows that no request needs, the least recently used first."""
        return {row: source for row in self._cached if (source := self._sources[row]) is not None}

    def problems(self, held: Collection[int]) -> list[str]:
        """Return what does not fit together, if requests have these rows."""
        used = {row for row, source in enumerate(self._sources) if source is not None}
        wanted = {*held, *self._cached}
        if used == wanted and len(wanted) == len(held) + len(self._cached):
            return []
        return [f"{len(used)} rows have sources, and {len(held) + len(self._cached)} should"]

    @property
    def has_ops(self) -> bool:
        """Whether there are operations to be done."""
        return bool(self._ops)

    def take_ops(self) -> tuple[RowOp, ...]:
        """Hand over the operations since the last call."""
        ops, self._ops = tuple(self._ops), []
        return ops

    def find(self, source: Source) -> int | None:
        """Return a row with an equal source that is encoded already."""
        rows = (*self._cached, *self._ready)
        return next((row for row in rows if self._sources[row] == source), None)

    def take(self, source: Source, found: int | None = None) -> int:
        """Return a row for a source: a copy of row `found`, or an empty one to be encoded into."""
        if found in self._cached:
            self._cached.remove(found)
            self._cached.append(found)
        if None not in self._sources:
            evicted = self._cached.pop(0)
            if evicted == found:  # the only one: it is not copied, but taken over
                return evicted
            self._empty(evicted, is_finite=True)
        row = min(self._cached + [self._sources.index(None)])
        if row in self._cached:
            moved = self._move_up(row)
            self._cached[self._cached.index(row)] = moved
            found = moved if found == row else found
        self._sources[row] = source
        if found is not None:
            self._ops.append(RowOp("copy_source", found, row))
        return row

    def mark_ready(self, row: int) -> None:
        """Let others copy a row: what was computed from it is finite."""
        self._ready.add(row)

    def release(self, row: int) -> None:
        """Empty the row of a request that has ended."""
        is_finite = row in self._ready
        self._ready.discard(row)
        self._empty(row, is_finite)

    def cache_source(self, row: int) -> None:
        """Release a row, but let its source stay somewhere while no one needs the place."""
        source = self._sources[row]
        known = next((r for r in self._cached if self._sources[r] == source), None)
        if known is not None:
            self._cached.remove(known)
            self._cached.append(known)
        if known is not None or row not in self._ready:
            self.release(row)
            return
        self._ready.discard(row)
        self._cached.append(self._move_up(row))

    def _move_up(self, row: int) -> int:
        """Move a source to the highest free row above it, if there is one; return where it is."""
        free = [r for r, source in enumerate(self._sources) if source is None and r > row]
        if not free:
            return row
        self._sources[free[-1]] = self._sources[row]
        self._ops.append(RowOp("copy_source", row, free[-1]))
        self._empty(row, is_finite=True)
        return free[-1]

    def _empty(self, row: int, is_finite: bool) -> None:
        self._sources[row] = None
        self._ops.append(RowOp("cut_source" if is_finite else "clear_source", row, row))
