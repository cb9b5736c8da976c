"""The rows that wait for a one-pass model, handed out in batches of equal length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.one_pass.item_encoder import EncodedItem
from engine.one_pass.job import PredictionJob


@dataclass(frozen=True, eq=False)
class Row:
    """One item of a job."""

    job: PredictionJob
    index: int
    item: EncodedItem
    number: int  # in order of arrival


class RowQueue:
    """Waiting rows by length, the oldest first. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._by_length: dict[int, deque[Row]] = {}
        self._waiting: dict[PredictionJob, list[int]] = {}  # [rows, tokens] not yet taken
        self._next_number = 0
        self.num_tokens = 0

    @property
    def num_requests(self) -> int:
        """Requests with a row that waits."""
        return len(self._waiting)

    def jobs(self) -> list[PredictionJob]:
        """Return the requests with a row that waits, in order of arrival."""
        return list(self._waiting)

    def add(self, job: PredictionJob, items: list[EncodedItem]) -> None:
        """Let every item of a request wait."""
        tokens = sum(item.cost for item in items)
        self._waiting[job] = [len(items), tokens]
        self.num_tokens += tokens
        for index, item in enumerate(items):
            row = Row(job, index, item, self._next_number)
            self._by_length.setdefault(item.length, deque()).append(row)
            self._next_number += 1

    def remove(self, job: PredictionJob) -> None:
        """Count a request out; its rows are skipped when their turn comes."""
        _, tokens = self._waiting.pop(job, (0, 0))
        self.num_tokens -= tokens

    def take(self, max_rows: Callable[[EncodedItem], int]) -> list[Row]:
        """Take the oldest row and those of its length behind it; nothing if none waits."""
        self._drop_void_heads()
        if not self._by_length:
            return []
        length, rows = min(self._by_length.items(), key=lambda entry: entry[1][0].number)
        size = max_rows(rows[0].item)
        batch: list[Row] = []
        while rows and len(batch) < size:
            row = rows.popleft()
            if row.job.is_open:
                batch.append(row)
                self._count_out(row)
        if not rows:
            del self._by_length[length]
        return batch

    def _drop_void_heads(self) -> None:
        for length, rows in list(self._by_length.items()):
            while rows and not rows[0].job.is_open:
                rows.popleft()
            if not rows:
                del self._by_length[length]

    def _count_out(self, row: Row) -> None:
        counts = self._waiting[row.job]
        counts[0] -= 1
        counts[1] -= row.item.cost
        self.num_tokens -= row.item.cost
        if counts[0] == 0:
            del self._waiting[row.job]
