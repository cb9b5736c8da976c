"""Which sources and prompts are not computed yet, and how much of them a step computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.sequence import Request, Sequence
from engine.scheduling.step import Chunk


@dataclass(slots=True)
class PrefillPlan:
    """The sources and prompt chunks of a step, beside its decoding sequences."""

    num_left: int  # tokens left of the step's budget
    num_left_to_score: int
    encoding: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    starting: list[Sequence] = field(default_factory=list)  # have one token left: they decode it
    num_read: int = 0  # tokens of the sources and chunks
    is_full: bool = False  # the next piece has no place in the step, or no room in the cache
    lacks_room: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was taken so far."""
        return not (self.encoding or self.chunks or self.starting)

    def holds(self, size: int) -> bool:
        """Whether the step may take so many tokens more.

        The first piece always runs, or a source longer than the budget would wait forever. So does
        a single token behind it: it is one sequence more that decodes.
        """
        return size <= max(1, self.num_left) or self.is_empty


class PrefillQueue:
    """The running requests that have not computed their source or prompt, in order of arrival."""

    def __init__(self, config: EngineConfig, cache: KVCache) -> None:
        self._config = config
        self._cache = cache
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Let a request compute its source and prompt, behind those that are here."""
        self._requests[request.key] = request

    def remove(self, request: Request) -> None:
        """Let a request go that has ended; nothing happens if it has computed all."""
        self._requests.pop(request.key, None)

    def plan_step(self, num_decoding: int) -> PrefillPlan:
        """Give out the step's budget for sources and prompts, counting their tokens as computed.

        A step computes no more scored tokens than one chunk has: the logits of each have a number
        for every token of the vocabulary.
        """
        plan = PrefillPlan(self._budget(num_decoding), self._config.prefill_chunk_size)
        for request in list(self._requests.values()):
            self._plan_request(request, plan)
            if plan.is_full:
                break
        return plan

    def _budget(self, num_decoding: int) -> int:
        """Return how many source and prompt tokens the step may take.

        While sequences decode, one chunk: their next tokens wait for the whole step, and so at most
        for one decode step and one chunk. But if more requests wait for their first token than
        sequences for their next one, all that those leave of the step: after a burst of arrivals,
        filling the batch soon gives more tokens than it delays.
        """
        left = self._config.max_num_batched_tokens - num_decoding
        if 0 < num_decoding >= len(self._requests):
            return min(left, self._config.prefill_chunk_size)
        return left

    def _plan_request(self, request: Request, plan: PrefillPlan) -> None:
        """Take all of a request that there is a place for."""
        if request.needs_encoding:
            size = len(request.asked.prompt_ids)
            if not plan.holds(size):
                plan.is_full = True
                return
            self._take_source(request, size, plan)
        reading = request.reading
        if not all(self._plan_chunks(sequence, plan) for sequence in reading):
            return
        if any(sequence.num_left for sequence in reading):
            self._start(request, reading, plan)
        else:
            self.remove(request)

    def _plan_chunks(self, sequence: Sequence, plan: PrefillPlan) -> bool:
        """Take chunks of a sequence; False: some of it is left, beside a single token."""
        while (size := self._next_piece(sequence)) > 0:
            start = sequence.num_computed
            chunk = Chunk(sequence, start, start + size)
            if not plan.holds(size) or not self._has_room(sequence, size, plan):
                plan.is_full = True
                return False
            num_scored = 0 if sequence.request.score_from is None else chunk.num_logits
            if num_scored > plan.num_left_to_score:
                return False
            plan.num_left_to_score -= num_scored
            self._take_chunk(chunk, size, plan)
        return True

    def _next_piece(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence are computed next in one chunk; 0: none.

        Never a single one that is left before a draw, and never the last generated one: a decode
        call computes those.
        """
        left, request = sequence.num_left, sequence.request
        if left == 1 and not request.is_score_only:
            return 0
        return min(left - (sequence.num_generated > 0), self._config.prefill_chunk_size)

    def _start(self, request: Request, reading: list[Sequence], plan: PrefillPlan) -> None:
        """Let all sequences of a request decode their single token, as beams must: together."""
        if not all(self._has_room(sequence, 1, plan) for sequence in reading):
            plan.is_full = True
            return
        plan.starting += reading
        plan.num_left -= len(reading)
        self.remove(request)

    def _has_room(self, sequence: Sequence, size: int, plan: PrefillPlan) -> bool:
        plan.lacks_room = not self._cache.grow(sequence, size)
        return not plan.lacks_room

    def _take_source(self, request: Request, size: int, plan: PrefillPlan) -> None:
        request.needs_encoding = False
        request.num_computed += size
        plan.encoding.append(request)
        plan.num_left -= size
        plan.num_read += size

    def _take_chunk(self, chunk: Chunk, size: int, plan: PrefillPlan) -> None:
        chunk.sequence.num_computed += size
        chunk.sequence.request.num_computed += size
        plan.chunks.append(chunk)
        plan.num_left -= size
        plan.num_read += size
