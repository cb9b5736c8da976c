"""Which sequence has which row of the cache."""

from __future__ import annotations

from engine.batch import RowOp
from engine.sequence import Sequence


class SlotTable:
    """Gives rows to sequences so that the decoding ones are always rows 0 to D-1.

    It knows no memory: every change is an operation for the cache, to be done in order before the
    next step.
    """

    def __init__(self, num_slots: int) -> None:
        self._owners: list[Sequence | None] = [None] * num_slots
        self._has_source = [False] * num_slots
        self._ops: list[RowOp] = []
        self.num_decoding = 0

    @property
    def decoding(self) -> list[Sequence]:
        """The sequences of rows 0 to D-1."""
        return [owner for owner in self._owners[: self.num_decoding] if owner is not None]

    @property
    def has_ops(self) -> bool:
        """Whether there are operations to be done."""
        return bool(self._ops)

    def take_ops(self) -> tuple[RowOp, ...]:
        """Hand over the operations since the last call."""
        ops, self._ops = tuple(self._ops), []
        return ops

    def take(self, sequence: Sequence) -> None:
        """Give a sequence an empty row."""
        row = self._owners.index(None, self.num_decoding)
        self._put(sequence, row)

    def copy(self, source: Sequence, target: Sequence) -> None:
        """Give a sequence a row with the content of another's."""
        assert source.row is not None
        self.take(target)
        assert target.row is not None
        self._ops.append(RowOp("copy", source.row, target.row))

    def overwrite(self, source: Sequence, target: Sequence, start: int) -> None:
        """Copy a row over the row of another sequence; before `start` both are equal already."""
        assert source.row is not None and target.row is not None
        self._ops.append(RowOp("copy", source.row, target.row, start))

    def take_source(self) -> int:
        """Return an empty row of the sources: the lowest, since a step binds all up to the last."""
        row = self._has_source.index(False)
        self._has_source[row] = True
        return row

    def release_source(self, row: int) -> None:
        """Clear a row of the sources."""
        self._has_source[row] = False
        self._ops.append(RowOp("clear_source", row, row))

    def promote(self, sequence: Sequence) -> None:
        """Make a sequence one of the decoding ones."""
        row, first_other = sequence.row, self.num_decoding
        assert row is not None and row >= first_other
        self.num_decoding += 1
        if row == first_other:
            return
        other = self._owners[first_other]
        if other is None:
            self._owners[row] = None
            self._ops.append(RowOp("move", row, first_other))
        else:
            self._put(other, row)
            self._ops.append(RowOp("swap", row, first_other))
        self._put(sequence, first_other)

    def release(self, sequence: Sequence) -> None:
        """Clear a sequence's row; the last decoding row fills a hole among the decoding ones."""
        row = sequence.row
        assert row is not None
        sequence.row = None
        self._owners[row] = None
        self._ops.append(RowOp("clear", row, row))
        if row >= self.num_decoding:
            return
        self.num_decoding -= 1
        last = self.num_decoding
        if row != last:
            mover = self._owners[last]
            assert mover is not None
            self._owners[last] = None
            self._put(mover, row)
            self._ops.append(RowOp("move", last, row))

    def _put(self, sequence: Sequence, row: int) -> None:
        self._owners[row] = sequence
        sequence.row = row
