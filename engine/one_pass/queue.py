"""The items that wait for a one-pass model, handed out in batches of equal length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.one_pass.item_encoder import EncodedItem
from engine.one_pass.job import PredictionJob


@dataclass(frozen=True, eq=False)
class WaitingItem:
    """An item of a job, in the queue."""

    job: PredictionJob
    index: int
    item: EncodedItem
    number: int  # in order of arrival


class ItemQueue:
    """Waiting items by length, the oldest first. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._by_length: dict[int, deque[WaitingItem]] = {}
        self._waiting: dict[PredictionJob, list[int]] = {}  # [items, tokens] not yet taken
        self._next_number = 0
        self.num_tokens = 0

    @property
    def num_requests(self) -> int:
        """Requests with an item that waits."""
        return len(self._waiting)

    def jobs(self) -> list[PredictionJob]:
        """Return the requests with an item that waits, in order of arrival."""
        return list(self._waiting)

    def add(self, job: PredictionJob, items: list[EncodedItem]) -> None:
        """Let every item of a request wait."""
        tokens = sum(item.cost for item in items)
        self._waiting[job] = [len(items), tokens]
        self.num_tokens += tokens
        for index, item in enumerate(items):
            waiting = WaitingItem(job, index, item, self._next_number)
            self._by_length.setdefault(item.length, deque()).append(waiting)
            self._next_number += 1

    def remove(self, job: PredictionJob) -> None:
        """Count a request out; its items are skipped when their turn comes."""
        _, tokens = self._waiting.pop(job, (0, 0))
        self.num_tokens -= tokens

    def take(self, max_items: Callable[[EncodedItem], int]) -> list[WaitingItem]:
        """Take the oldest item and those of its length behind it; nothing if none waits."""
        for length, line in list(self._by_length.items()):
            while line and not line[0].job.is_open:
                line.popleft()
            if not line:
                del self._by_length[length]
        if not self._by_length:
            return []
        length, line = min(self._by_length.items(), key=lambda entry: entry[1][0].number)
        size = max_items(line[0].item)
        batch: list[WaitingItem] = []
        while line and len(batch) < size:
            waiting = line.popleft()
            if waiting.job.is_open:
                batch.append(waiting)
                counts = self._waiting[waiting.job]
                counts[0] -= 1
                counts[1] -= waiting.item.cost
                self.num_tokens -= waiting.item.cost
                if counts[0] == 0:
                    del self._waiting[waiting.job]
        if not line:
            del self._by_length[length]
        return batch
