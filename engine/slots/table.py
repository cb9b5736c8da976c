"""The owners of a cache's rows: sequences, and cached prefixes of ended ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.scheduling.sequence import Sequence
from engine.slots.batch import RowOp


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """The beginning of an ended sequence, whose keys and values are still in a row."""

    tenant: str  # only its requests may use it
    tokens: list[int]
    row: int


class SlotTable:
    """Gives rows to sequences so that those which decode in a step are rows 0 to D-1.

    A row that no sequence needs may keep the beginning of an ended one; the least recently used is
    evicted when there is no empty row. Holes that ended sequences leave are filled when rows are
    wanted again: of those that end together none is moved. The table knows no memory: every change
    is an operation for the cache, to be done in order before the next step.
    """

    def __init__(self, num_slots: int) -> None:
        self._owners: list[Sequence | CachedPrefix | None] = [None] * num_slots
        self._cached: OrderedDict[CachedPrefix, None] = OrderedDict()  # by use, the latest last
        self._rows: dict[Sequence, int] = {}
        self._ops: list[RowOp] = []
        self.num_decoding = 0

    @property
    def decoding(self) -> list[Sequence]:
        """The sequences that decode, in the order of their rows."""
        rows = self._owners[: self.num_decoding]
        return [owner for owner in rows if isinstance(owner, Sequence)]

    @property
    def cached(self) -> list[CachedPrefix]:
        """The cached prefixes, the least recently used first."""
        return list(self._cached)

    @property
    def has_ops(self) -> bool:
        """Whether there are operations to be done."""
        return bool(self._ops)

    def take_ops(self) -> tuple[RowOp, ...]:
        """Hand over the operations since the last call."""
        ops, self._ops = tuple(self._ops), []
        return ops

    @property
    def sequences(self) -> Mapping[Sequence, int]:
        """The sequences that have rows, and which."""
        return self._rows

    def problems(self) -> list[str]:
        """Return what does not fit together."""
        wanted: dict[int, Sequence | CachedPrefix] = {row: one for one, row in self._rows.items()}
        wanted |= {cached.row: cached for cached in self._cached}
        found = {row: owner for row, owner in enumerate(self._owners) if owner is not None}
        return [] if found == wanted else ["rows have other owners than their owners say"]

    def row_of(self, sequence: Sequence) -> int | None:
        """Return the row of a sequence, if it has one."""
        return self._rows.get(sequence)

    def take(self, sequence: Sequence) -> None:
        """Give a sequence an empty row."""
        self._fill_holes()
        if None not in self._owners[self.num_decoding :]:
            self._evict(next(iter(self._cached)))
        row = self._owners.index(None, self.num_decoding)
        self._put(sequence, row)

    def copy(self, parent: Sequence, child: Sequence) -> None:
        """Give a sequence a row with the content of another's."""
        self.take(child)
        self._ops.append(RowOp("copy", self._rows[parent], self._rows[child]))

    def take_prefix(self, sequence: Sequence, holder: Sequence | CachedPrefix, length: int) -> None:
        """Give a sequence a row that begins with the first positions of another."""
        self._fill_holes()
        if isinstance(holder, Sequence):
            self.take(sequence)
            row = self._rows[holder]
        else:
            self._cached.move_to_end(holder)
            is_full = None not in self._owners[self.num_decoding :]
            if is_full and len(self._cached) == 1:  # no other row can be evicted
                del self._cached[holder]
                self._put(sequence, holder.row)
                self._ops.append(RowOp("cut", holder.row, holder.row, length))
                return
            self.take(sequence)
            row = holder.row
        self._ops.append(RowOp("copy", row, self._rows[sequence], 0, length))

    def overwrite(self, parent: Sequence, child: Sequence, start: int) -> None:
        """Copy a row over the row of another sequence; before `start` both are equal already."""
        self._ops.append(RowOp("copy", self._rows[parent], self._rows[child], start))

    def decode(self, sequences: Collection[Sequence]) -> list[Sequence]:
        """Make these the decoding ones, and no others; return them in the order of their rows.

        Only those change places that have to: many may pause in every second step.
        """
        self._fill_holes()
        self.num_decoding = count = len(sequences)
        behind = [sequence for sequence in sequences if self._rows[sequence] >= count]
        if behind:
            wanted = set(sequences)
            others = [row for row in range(count) if self._owners[row] not in wanted]
            for sequence, row in zip(behind, others, strict=True):
                self._exchange(sequence, row)
        return self.decoding

    def _exchange(self, sequence: Sequence, target: int) -> None:
        """Take a sequence to another row, and what is there to its own."""
        row, other = self._rows[sequence], self._owners[target]
        if other is None:
            self._owners[row] = None
            self._ops.append(RowOp("move", row, target))
        else:
            self._put(other, row)
            self._ops.append(RowOp("swap", row, target))
        self._put(sequence, target)

    def release(self, sequence: Sequence, *, is_finite: bool = False) -> None:
        """Empty a sequence's row; it is cleared unless it is known to be finite."""
        self._vacate(sequence, 0, is_finite)

    def cache_prefix(self, sequence: Sequence, length: int, tenant: str) -> None:
        """Release a finite row, but let its first positions stay while no one needs the row."""
        tokens = sequence.tokens[:length]
        own = [cached for cached in self._cached if cached.tenant == tenant]
        if length == 0 or self._is_cached(tokens, own):
            self.release(sequence, is_finite=True)
            return
        for shorter in [k for k in own if tokens[: len(k.tokens)] == k.tokens]:
            self._evict(shorter)
        row = self._vacate(sequence, length, is_finite=True)
        self._owners[row] = cached = CachedPrefix(tenant, tokens, row)
        self._cached[cached] = None

    def _vacate(self, sequence: Sequence, length: int, is_finite: bool) -> int:
        """Take a sequence's row, but for its first positions; return which one it was."""
        row = self._rows.pop(sequence)
        self._owners[row] = None
        self._ops.append(RowOp("cut" if is_finite else "clear", row, row, length))
        return row

    def _fill_holes(self) -> None:
        """Let the last decoding sequences take the rows that others have left among the first."""
        decoding = self.decoding
        if len(decoding) == self.num_decoding:
            return
        self.num_decoding = len(decoding)
        first_rows = self._owners[: self.num_decoding]
        holes = [row for row, owner in enumerate(first_rows) if not isinstance(owner, Sequence)]
        for row, sequence in zip(holes, reversed(decoding), strict=False):
            self._exchange(sequence, row)

    def _is_cached(self, tokens: list[int], own: list[CachedPrefix]) -> bool:
        """Whether one of these begins with the tokens; it has been used then."""
        known = next((k for k in own if k.tokens[: len(tokens)] == tokens), None)
        if known is not None:
            self._cached.move_to_end(known)
        return known is not None

    def _evict(self, cached: CachedPrefix) -> None:
        del self._cached[cached]
        self._owners[cached.row] = None
        self._ops.append(RowOp("cut", cached.row, cached.row))

    def _put(self, owner: Sequence | CachedPrefix, row: int) -> None:
        self._owners[row] = owner
        if isinstance(owner, Sequence):
            self._rows[owner] = row
        else:
            owner.row = row
