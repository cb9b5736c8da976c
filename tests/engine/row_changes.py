"""Runs the same changes of rows on memory of the host and of a device, and compares."""

from __future__ import annotations

import numpy as np

from engine.package.manifest import CacheDtype, CacheShape
from engine.slots.batch import RowOp
from engine.slots.memory import Allocate, CacheMemory
from engine.slots.rows import SlotCache

NUM_SLOTS = 5
KINDS = ("cut", "clear", "move", "copy", "swap", "cut_source", "clear_source", "copy_source")


class TwoCaches:
    """A cache on the host beside one on a device, both with the same random content."""

    def __init__(self, allocate: Allocate, dtype: CacheDtype, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        # 64 numbers: rows lose whole pages of the host. A device has no pages to lose.
        shape = CacheShape(num_layers=2, num_kv_heads=3, max_len=40, head_dim=64, dtype=dtype)
        cross = CacheShape(num_layers=2, num_kv_heads=2, max_len=17, head_dim=64)
        self.host = SlotCache(NUM_SLOTS, shape, cross)
        self.device = SlotCache(NUM_SLOTS, shape, cross, allocate)
        for name in ("rows", "sources"):
            host, device = getattr(self.host, name), getattr(self.device, name)
            for row in range(NUM_SLOTS):
                numbers = self.rng.uniform(-100, 100, self.content(host)[row].shape)
                host.write(row, numbers)
                device.write(row, numbers)
        for cache in (self.host, self.device):
            cache.lengths[:] = [40, 0, 23, 1, 39]
            cache.source_lengths[:] = [0, 17, 5, 0, 1]

    def random_op(self) -> RowOp:
        """Return a change that a scheduler could ask for."""
        lengths, source_lengths = self.host.lengths, self.host.source_lengths
        while True:
            kind = str(self.rng.choice(KINDS))
            one, other = map(int, self.rng.permutation(NUM_SLOTS)[:2])
            known = int(min(lengths[one], lengths[other]))
            if kind in ("cut", "clear"):
                return RowOp(kind, one, other, int(self.rng.integers(0, lengths[other] + 1)))
            if kind == "copy":
                start = int(self.rng.integers(0, known + 1))
                stop = int(self.rng.integers(start, 41))
                return RowOp(kind, one, other, start, self.rng.choice([stop, None]))
            is_full = (kind == "move" and lengths[other]) or (
                kind == "copy_source" and source_lengths[other]
            )
            if not is_full:
                return RowOp(kind, one, other)

    def write_some(self) -> None:
        """Let a row that is not full grow, as a step does."""
        row = int(self.rng.integers(NUM_SLOTS))
        length = int(self.rng.integers(self.host.lengths[row], 41))
        before = self.host.rows.read(row, int(self.host.lengths[row]))
        numbers = self.rng.uniform(-100, 100, (*before.shape[:3], length, 64))
        for cache in (self.host, self.device):
            cache.rows.write(row, numbers)
            cache.lengths[row] = length

    def apply(self, op: RowOp) -> None:
        """Apply a change to both; rows must be equal as far as they reach, all others as before."""
        before = self.content(self.device.rows), self.content(self.device.sources)
        self.host.apply([op])
        self.device.apply([op])
        after = self.content(self.device.rows), self.content(self.device.sources)
        self.compare(f"after {op}")
        of_sources = op.kind.endswith("_source")
        changed = {op.target} | ({op.origin} if op.kind in ("move", "swap") else set())
        for row in range(NUM_SLOTS):
            for i, is_changed in enumerate((not of_sources, of_sources)):
                if not (is_changed and row in changed):
                    assert np.array_equal(before[i][row], after[i][row]), f"{op} changed row {row}"

    def compare(self, when: str) -> None:
        assert self.host.lengths.tolist() == self.device.lengths.tolist(), when
        assert self.host.source_lengths.tolist() == self.device.source_lengths.tolist(), when
        for name, lengths in (("rows", self.host.lengths), ("sources", self.host.source_lengths)):
            host, device = getattr(self.host, name), getattr(self.device, name)
            for row, length in enumerate(lengths.tolist()):
                wanted, found = host.read(row, length), device.read(row, length)
                assert np.array_equal(wanted, found), f"{name}: row {row} differs {when}"

    @staticmethod
    def content(memory: CacheMemory) -> list[np.ndarray]:
        length = memory.layers[0].key.shape[2]
        return [memory.read(row, length) for row in range(NUM_SLOTS)]


def run_random_changes(allocate: Allocate, dtype: CacheDtype, *, seed: int, count: int) -> int:
    """Apply random changes to both; return how many."""
    caches = TwoCaches(allocate, dtype, seed)
    caches.compare("at first")
    for _ in range(count):
        caches.apply(caches.random_op())
        caches.write_some()
    caches.compare("at last")
    return count
