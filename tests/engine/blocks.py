"""A second KVCache: blocks with a table, as paged attention has them, and a scripted model on them.

It has no kernel. It is there to show that the seam carries another layout than slots, and what
slots never do: to have no room for the next token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from engine.sampling.sampler import Sampler
from engine.sampling.top_k import step_logits
from engine.scheduling.sequence import Request, Sequence
from engine.scheduling.step import Parts, Step, StepResult

Table = tuple[int, ...]
Script = Callable[[list[int], list[int]], int | np.ndarray]
VOCAB_SIZE = 258


class BlockPlaces(NamedTuple):
    """The blocks that a step reads and writes."""

    copies: tuple[tuple[int, int], ...]  # from one block to another, before anything is computed
    chunks: tuple[Table, ...]
    decoding: tuple[Table, ...]
    starts: tuple[int, ...]  # tokens before, one a decoding sequence


class BlockKVCache:
    """Gives out blocks one by one; forks share them until one of both writes."""

    has_room_for_all = False

    def __init__(self, num_blocks: int, block_size: int = 4) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.clear()

    def clear(self) -> None:
        self._free = list(range(self.num_blocks))
        self._users = [0] * self.num_blocks
        self.tables: dict[Sequence, list[int]] = {}
        self._copies: list[tuple[int, int]] = []

    @property
    def used(self) -> float:
        return 1 - len(self._free) / self.num_blocks

    @property
    def has_changes(self) -> bool:
        return bool(self._copies)

    def num_cached(self, request: Request) -> int:
        return 0

    def admit(self, request: Request) -> int | None:
        wanted = sum(self._num_blocks(len(one.tokens) + 1) for one in request.reading)
        if wanted > len(self._free):
            return None
        self.tables |= {one: [] for one in request.sequences if not one.is_finished}
        return 0

    def share(self, request: Request) -> None:
        pass

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        start, table = sequence.num_computed, self.tables[sequence]
        total = self._num_blocks(start + num_tokens)
        shared = [
            i
            for i in range(start // self.block_size, min(total, len(table)))
            if self._users[table[i]] > 1
        ]
        if max(0, total - len(table)) + len(shared) > len(self._free):
            return False
        for i in shared:
            block = self._take()
            self._copies.append((table[i], block))
            self._users[table[i]] -= 1
            table[i] = block
        table += [self._take() for _ in range(total - len(table))]
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self.drop(child)
        shared = self.tables[parent][: self._num_blocks(parent.num_computed)]
        for block in shared:
            self._users[block] += 1
        self.tables[child] = list(shared)

    def drop(self, sequence: Sequence) -> None:
        for block in self.tables[sequence]:
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free.append(block)
        self.tables[sequence] = []

    def release(self, sequence: Sequence, *, sound: bool) -> None:
        self.drop(sequence)
        del self.tables[sequence]

    def arrange(self, decoding: list[Sequence]) -> list[Sequence]:
        return decoding

    def slot_mapping(self, parts: Parts) -> BlockPlaces:
        copies, self._copies = tuple(self._copies), []
        return BlockPlaces(
            copies,
            tuple(tuple(self.tables[chunk.sequence]) for chunk in parts.chunks),
            tuple(tuple(self.tables[sequence]) for sequence in parts.decoding),
            tuple(sequence.num_computed - 1 for sequence in parts.decoding),
        )

    def problems(self, requests: Iterable[Request]) -> list[str]:
        """Say if a block is not free, or not in exactly as many tables as it is said to be."""
        users = [0] * self.num_blocks
        for table in self.tables.values():
            for block in table:
                users[block] += 1
        free = [i for i, count in enumerate(users) if count == 0]
        is_in_order = users == self._users and sorted(self._free) == free
        return [] if is_in_order else ["blocks have other users than are counted"]

    def snapshot(self) -> object:
        return self.num_blocks

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class BlockStepRunner:
    """A StepRunner without a model: blocks hold token ids, and a script continues them."""

    overlaps = has_result = False

    def __init__(self, script: Script, cache: BlockKVCache) -> None:
        self._script, self._size = script, cache.block_size
        self._num_blocks = cache.num_blocks
        self._results: deque[StepResult] = deque()
        self.reset()

    def reset(self) -> None:
        self._results.clear()
        self._blocks: list[list[int]] = [[-1] * self._size for _ in range(self._num_blocks)]

    def submit(self, step: Step) -> None:
        places = step.slot_mapping
        assert isinstance(places, BlockPlaces)
        for source, target in places.copies:
            self._blocks[target] = list(self._blocks[source])
        behind_chunks = []
        for chunk, table in zip(step.parts.chunks, places.chunks, strict=True):
            source = self._source_of(chunk.sequence)
            rows = self._compute(source, table, chunk.start, chunk.token_ids)
            behind_chunks += rows[len(rows) - chunk.num_logits :]
        rows = []
        for sequence, table, start, token in zip(
            step.parts.decoding, places.decoding, places.starts, step.parts.decode_ids, strict=True
        ):
            rows += self._compute(self._source_of(sequence), table, start, (token,))
        array = np.asarray([*rows, *behind_chunks], np.float32).reshape(-1, VOCAB_SIZE)
        logits, sampler = step_logits(array, step.parts.num_top), Sampler()
        plain = sampler.choose(logits, step.sampling_batch)
        choices = sampler.sample(logits, step.draws)
        scores = [sampler.score(logits, draw) for draw in step.scores]
        self._results.append(StepResult(plain, tuple(choices), tuple(scores)))

    def snapshot(self) -> object:
        return len(self._blocks)

    def collect(self) -> StepResult:
        return self._results.popleft()

    def _source_of(self, sequence: Sequence) -> list[int]:
        request = sequence.request
        has_source = tuple(sequence.tokens[:1]) == (256,)
        return list(request.asked.prompt_ids) if has_source else []

    def _compute(
        self, source: list[int], table: Table, start: int, ids: tuple[int, ...]
    ) -> list[np.ndarray]:
        rows = []
        for position, token in enumerate(ids, start):
            self._blocks[table[position // self._size]][position % self._size] = token
            tokens = [self._blocks[table[i // self._size]][i % self._size] for i in range(position)]
            assert -1 not in tokens, "a position was skipped"
            answer = self._script(source, [*tokens, token])
            if not isinstance(answer, np.ndarray):
                logits = np.zeros(VOCAB_SIZE, np.float32)
                logits[answer] = 9.0
                answer = logits
            rows.append(answer)
        return rows
