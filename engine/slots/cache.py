"""Slots: a row of the cache for every sequence, and another for its source."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.package.manifest import GenerationContract
from engine.scheduling.sequence import Request, Sequence
from engine.scheduling.step import Chunk, Parts
from engine.slots.batch import Encode, PrefillChunk, RowLengths, ScheduledBatch
from engine.slots.prefix_cache import Holder, PrefixCache
from engine.slots.sources import Source, SourceTable
from engine.slots.table import SlotTable


@dataclass(slots=True)
class _Held:
    """The rows of a request."""

    num_places: int  # its sequences: those that have no row yet are sure to get one
    is_sound: bool  # its keys and values are finite
    source_row: int = 0


class SlotKVCache:
    """A KVCache of rows; a sequence has room for the whole context as soon as it is admitted.

    A row that nobody needs keeps what other requests may use: the beginning of a prompt, or a
    source. Only requests of the same tenant may: times and counts would show that it is there.
    """

    has_room_for_all = True

    def __init__(self, config: EngineConfig, contract: GenerationContract) -> None:
        self._num_slots = config.max_num_seqs
        self._reuses_sources = config.reuse_prefixes
        self._has_source = contract.cross_cache is not None
        self._prefix_cache = PrefixCache(config, contract)
        self.clear()

    def clear(self) -> None:
        """Let everything go, see KVCache."""
        self._table = SlotTable(self._num_slots)
        self._sources = SourceTable(self._num_slots)
        self._held: dict[Request, _Held] = {}
        self._num_places = 0

    @property
    def used(self) -> float:
        """The share of the rows that sequences have or are sure to get."""
        return self._num_places / self._num_slots

    @property
    def has_changes(self) -> bool:
        """Whether rows are to be emptied."""
        return self._table.has_ops or self._sources.has_ops

    def num_cached(self, request: Request) -> int:
        """Return how many tokens another row has of a request."""
        if not self._has_source:
            return self._longest_prefix(request)[1]
        return 0 if self._equal_source(request) is None else len(request.asked.prompt_ids)

    def admit(self, request: Request) -> int | None:
        """Give a row to what computes first and to the source, see KVCache."""
        count = request.num_unfinished
        if self._num_places + count > self._num_slots:
            return None
        first, *others = request.reading
        held = _Held(count, is_sound=request.first_token is not None)
        if self._has_source:
            self._table.take(first)
            found = self._equal_source(request)
            held.source_row = self._sources.take(_source(request), found)
            num_cached = 0 if found is None else len(request.asked.prompt_ids)
        else:
            holder, length = self._longest_prefix(request)
            if holder is None:
                self._table.take(first)
            else:
                self._table.take_prefix(first, holder, length)
            num_cached = length
        for sequence in others:
            self._table.take(sequence)
        self._held[request] = held
        self._num_places += count
        return num_cached

    def share(self, request: Request) -> None:
        """Let others copy the rows of a request."""
        held = self._held[request]
        held.is_sound = True
        if self._has_source:
            self._sources.mark_ready(held.source_row)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return True: there is room for the whole context."""
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Copy a row, but for what both begin with."""
        if self._table.row_of(child) is None:
            self._table.copy(parent, child)
        else:
            equal = _num_common(parent.tokens, child.tokens, parent.num_computed)
            self._table.overwrite(parent, child, equal)

    def drop(self, sequence: Sequence) -> None:
        """Empty the row of a sequence for others."""
        self._table.release(sequence)

    def release(self, sequence: Sequence, *, sound: bool) -> None:
        """Empty the row of a sequence, or keep the beginning for others; see KVCache."""
        request = sequence.request
        held = self._held[request]
        held.num_places -= 1
        self._num_places -= 1
        if self._table.row_of(sequence) is not None:
            if sound and held.is_sound:
                length = self._prefix_cache.num_reusable(sequence)
                self._table.cache_prefix(sequence, length, sequence.request.asked.tenant)
            else:
                self._table.release(sequence)
        if held.num_places == 0:
            del self._held[request]
            if self._has_source:
                if sound and self._reuses_sources:
                    self._sources.cache_source(held.source_row)
                else:
                    self._sources.release(held.source_row)

    def arrange(self, decoding: Collection[Sequence]) -> list[Sequence]:
        """Bring the sequences to the first rows; return them in the order of those."""
        return self._table.decode(decoding)

    def slot_mapping(self, parts: Parts) -> ScheduledBatch:
        """Return a step as the model runner takes it, in rows."""
        return ScheduledBatch(
            row_ops=(*self._table.take_ops(), *self._sources.take_ops()),
            encodes=tuple(
                [Encode(self._held[r].source_row, r.asked.prompt_ids) for r in parts.encoding]
            ),
            chunks=tuple([self._place(chunk) for chunk in parts.chunks]),
            decode_ids=parts.decode_ids,
            decode_sources=self._sources_of(parts.decoding),
            num_top=parts.num_top,
            aligned=parts.aligned,
            future_tokens=parts.future_tokens,
        )

    def problems(self, requests: Iterable[Request]) -> list[str]:
        """Return what does not fit together, see KVCache."""
        found = self._table.problems()
        if self._has_source:
            found += self._sources.problems([held.source_row for held in self._held.values()])
        if set(self._held) != (admitted := set(requests)):
            found.append(f"{len(self._held)} requests hold rows, and {len(admitted)} run")
        num_places = sum(request.num_unfinished for request in self._held)
        if num_places != self._num_places:
            found.append(f"{num_places} places are held, and {self._num_places} are counted")
        found += [
            f"{sequence.request.asked.request_id}: it has ended, and still has a row"
            for sequence in self._table.sequences
            if sequence.request not in self._held
        ]
        return found

    def snapshot(self) -> RowLengths:
        """Return how many tokens each row holds when all its changes are done."""
        rows, sources = [0] * self._num_slots, [0] * self._num_slots
        for sequence, row in self._table.sequences.items():
            rows[row] = sequence.num_computed
        for cached in self._table.cached:
            rows[cached.row] = len(cached.tokens)
        if self._has_source:
            for row, (_, ids) in self._sources.cached.items():
                sources[row] = len(ids)
            for request, held in self._held.items():
                if not request.needs_encoding:
                    sources[held.source_row] = len(request.asked.prompt_ids)
        return RowLengths(tuple(rows), tuple(sources))

    def _place(self, chunk: Chunk) -> PrefillChunk:
        row, held = self._table.row_of(chunk.sequence), self._held[chunk.sequence.request]
        assert row is not None
        return PrefillChunk(row, chunk.token_ids, chunk.num_logits, held.source_row)

    def _sources_of(self, decoding: Collection[Sequence]) -> tuple[int, ...]:
        if not self._has_source:
            return ()
        return tuple([self._held[sequence.request].source_row for sequence in decoding])

    def _longest_prefix(self, request: Request) -> tuple[Holder | None, int]:
        return self._prefix_cache.longest(request, self._prefix_holders(request.asked.tenant))

    def _prefix_holders(self, tenant: str) -> Iterator[tuple[Holder, int]]:
        """Give what has a row with the beginning of a prompt, and how much of it may be copied.

        Nothing of a request before its first token: that shows that it is finite.
        """
        for cached in self._table.cached:
            if cached.tenant == tenant:
                yield cached, len(cached.tokens)
        for request, held in self._held.items():
            if request.asked.tenant != tenant or not held.is_sound:
                continue
            for sequence in request.sequences:
                if self._table.row_of(sequence) is not None:
                    yield sequence, self._prefix_cache.num_reusable(sequence)
                    break

    def _equal_source(self, request: Request) -> int | None:
        return self._sources.find(_source(request)) if self._reuses_sources else None


def _source(request: Request) -> Source:
    return request.asked.tenant, request.asked.prompt_ids


def _num_common(one: list[int], other: list[int], limit: int) -> int:
    """Return how many of the first tokens are equal, at most `limit`."""
    for i in range(limit):
        if one[i] != other[i]:
            return i
    return limit
