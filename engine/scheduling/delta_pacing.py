"""Paces deltas: the more streams, the more tokens in each."""

from __future__ import annotations

from engine.requests.request import Deltas
from engine.scheduling.sequence import Sequence

_GROUP = 32  # sequences that are emitted together, which costs less for each


class DeltaPacing:
    """Goes round the sequences, once in the time that lies between two deltas of each.

    That time is as the last request with one has asked for it.
    """

    def __init__(self) -> None:
        self._deltas = Deltas()
        self._last = 0.0  # when some were due, on the scheduler's clock
        self._next = 0  # index of the sequence that the round goes on with

    def ask(self, deltas: Deltas | None) -> None:
        """Note what a request asks for."""
        if deltas is not None and deltas.min_seconds:
            self._deltas = deltas

    def due(self, sequences: tuple[Sequence, ...], now: float) -> tuple[Sequence, ...]:
        """Return those whose next delta is due, of all that decode."""
        if not (num_all := len(sequences)) or not self._deltas.min_seconds:
            return ()
        seconds = self._deltas.min_seconds + self._deltas.min_seconds_each * num_all
        num_due = int(num_all * (now - self._last) / seconds)
        if num_due < min(_GROUP, num_all):
            return ()
        self._last = now
        if num_due >= num_all:
            return sequences
        start = self._next % num_all
        self._next = start + num_due
        return sequences[start : self._next] + sequences[: max(0, self._next - num_all)]
