"""What other rows hold of a new request already: the beginning of its prompt, or its source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.config import EngineConfig
from engine.package.manifest import GenerationContract
from engine.scheduling.sequence import Request, Sequence
from engine.slots.sources import Source, SourceTable
from engine.slots.table import KeptPrefix, SlotTable


class RowReuse:
    """Gives requests rows with what others have computed, and leaves in theirs what others may use.

    An encoder-decoder reuses whole sources, any other model whole chunks of a prompt's beginning.
    Only of the request's own tenant: times and counts tell what is there already.
    """

    def __init__(
        self,
        config: EngineConfig,
        contract: GenerationContract,
        slots: SlotTable,
        sources: SourceTable,
    ) -> None:
        self._is_on = config.reuse_prefixes
        self._chunk_size = config.prefill_chunk_size
        self._has_source = contract.cross_cache is not None
        self._slots = slots
        self._sources = sources

    def place(self, request: Request, running: Iterable[Request]) -> None:
        """Give the leader its row, and the source its own, with what others have computed."""
        leader, ids = request.leader, request.source.prompt_ids
        if self._has_source:
            self._slots.take(leader)
            found = self._equal_source(request)
            request.source_row = self._sources.take(_source(request), found)
            if found is not None:
                request.needs_encoding, request.num_cached = False, len(ids)
            return
        holder, length = self._longest_prefix(request, running)
        if holder is None:
            self._slots.take(leader)
        else:
            self._slots.take_prefix(leader, holder, length)
            leader.num_computed = request.num_cached = length

    def num_cached(self, request: Request, running: Iterable[Request]) -> int:
        """Return how many tokens of the request need not be computed, as things are now."""
        if not self._has_source:
            return self._longest_prefix(request, running)[1]
        is_encoded = self._equal_source(request) is not None
        return len(request.source.prompt_ids) if is_encoded else 0

    def release_row(self, sequence: Sequence) -> None:
        """Release the row of a sequence that has ended, if it has one."""
        if sequence.row is None:
            return
        request = sequence.request
        # Logits behind all its positions were finite, and so are its keys and values.
        if request.ends_normally and request.first_token is not None:
            self._slots.keep(sequence, self._num_reusable(sequence), request.source.tenant)
        else:
            self._slots.release(sequence)

    def release_source(self, request: Request) -> None:
        """Release the row of an ended request's source, if the model has one."""
        if not self._has_source:
            return
        if self._is_on and request.ends_normally:
            self._sources.keep(request.source_row)
        else:
            self._sources.release(request.source_row)

    def _equal_source(self, request: Request) -> int | None:
        return self._sources.find(_source(request)) if self._is_on else None

    def _longest_prefix(
        self, request: Request, running: Iterable[Request]
    ) -> tuple[Sequence | KeptPrefix | None, int]:
        """Return whose row begins like the prompt, and how many of its positions can be copied.

        They are whole chunks: the chunks behind them are then those that the request would compute
        without a copy, and give the same bits. Logits are not kept, so that one token at least is
        left to be computed, and a request that scores its prompt computes all.
        """
        # Elsewhere cut prompts give other bits: in fp32, onnxruntime 1.31 computes the last row of
        # a call alone if the number of rows is 1 above a multiple of its tile (16 to 64).
        tokens, size = request.leader.tokens, self._chunk_size
        best: tuple[Sequence | KeptPrefix | None, int] = (None, 0)
        most = (len(tokens) - 1) // size * size
        if not self._is_on or request.score_from is not None or most == 0:
            return best
        for holder, limit in self._prefix_holders(request.source.tenant, running):
            length = _common_chunks(tokens, holder.tokens, min(limit, most), size)
            if length > best[1]:
                best = holder, length
        return best

    def _prefix_holders(
        self, tenant: str, running: Iterable[Request]
    ) -> Iterator[tuple[Sequence | KeptPrefix, int]]:
        """Give what has a row with the beginning of a prompt, and how much of it may be copied."""
        for kept in self._slots.kept:
            if kept.tenant == tenant:
                yield kept, len(kept.tokens)
        for request in running:
            if request.source.tenant != tenant:
                continue
            sequence = next((s for s in request.sequences if s.row is not None), None)
            if sequence is not None:
                yield sequence, self._num_reusable(sequence)

    def _num_reusable(self, sequence: Sequence) -> int:
        """Return how many first positions another prompt may use: those of whole chunks.

        None before the first token: it shows that they are finite. None with a source, which
        everything depends on.
        """
        if self._has_source or not self._is_on:
            return 0
        if sequence.request.first_token is None:
            return 0
        size = self._chunk_size
        return min(sequence.num_prompt, sequence.num_computed) // size * size


def _source(request: Request) -> Source:
    return request.source.tenant, request.source.prompt_ids


def _common_chunks(one: list[int], other: list[int], limit: int, size: int) -> int:
    """Return how many of the first tokens are equal, in whole chunks and at most `limit`."""
    for start in range(0, limit, size):
        if one[start : start + size] != other[start : start + size]:
            return start
    return limit
