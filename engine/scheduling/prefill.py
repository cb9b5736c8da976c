"""Which sources and prompts are not computed yet, and how much of them a step computes."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.scheduling.sequence import Request, Sequence
from engine.scheduling.step import Chunk, PrefillPlan
from engine.slots.table import SlotTable


class PrefillQueue:
    """The running requests that have not computed their source or prompt, in order of arrival."""

    def __init__(self, config: EngineConfig, slots: SlotTable) -> None:
        self._config = config
        self._slots = slots
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Let a request compute its source and prompt, behind those that are here."""
        self._requests[request.key] = request

    def remove(self, request: Request) -> None:
        """Let a request go that has ended; nothing happens if it has computed all."""
        self._requests.pop(request.key, None)

    def plan_step(self) -> PrefillPlan:
        """Give out the step's budget for sources and prompts, counting their tokens as computed.

        The first piece always runs: a source longer than the budget would else wait for ever. So
        does a single token behind it: it is one row more of the decode call.

        Where the given tokens of prompts are scored, a step computes as many of them as one chunk
        has: a row of logits has a number for every token there is.
        """
        plan = PrefillPlan()
        left = self._budget()
        left_to_score = self._config.prefill_chunk_size
        for request in list(self._requests.values()):
            while (size := self._next_piece(request)) > 0:
                if size > max(1, left) and not plan.is_empty:
                    return plan
                if (num_scored := _num_scored(request, size)) > left_to_score:
                    break
                left -= size
                left_to_score -= num_scored
                plan.is_empty = False
                self._plan_piece(request, size, plan)
        return plan

    def _budget(self) -> int:
        """Return how many source and prompt tokens the step may take.

        While sequences decode, one chunk: their next tokens wait for the whole step, and so at most
        for one decode step and one chunk. But if more requests wait for their first token than
        sequences for their next one, all that those leave of the step: after a burst of arrivals,
        filling the batch soon gives more tokens than it delays.
        """
        num_decoding, config = self._slots.num_decoding, self._config
        left = config.max_num_batched_tokens - num_decoding
        if 0 < num_decoding >= len(self._requests):
            return min(left, config.prefill_chunk_size)
        return left

    def _next_piece(self, request: Request) -> int:
        """Return how many tokens the request computes next; 0 if it waits for its next draw."""
        if request.key not in self._requests:
            return 0
        if request.needs_encoding:
            return len(request.source.prompt_ids)
        return min(request.leader.num_left, self._config.prefill_chunk_size)

    def _plan_piece(self, request: Request, size: int, plan: PrefillPlan) -> None:
        leader = request.leader
        if request.needs_encoding:
            request.needs_encoding = False
            request.num_computed += size
            plan.num_tokens += size
            plan.encoded.append(request)
            return
        if leader.num_left == 1 and not request.is_score_only:
            self._slots.promote(leader)
            self.remove(request)
            return
        chunk = _next_chunk(leader, size)
        leader.num_computed += size
        request.num_computed += size
        plan.num_tokens += size
        plan.chunks.append(chunk)
        if leader.num_left == 0:
            self.remove(request)


def _next_chunk(leader: Sequence, size: int) -> Chunk:
    return Chunk(leader, leader.num_computed, leader.num_computed + size)


def _num_scored(request: Request, size: int) -> int:
    """Return for how many positions the next piece of a request wants logits to score tokens."""
    if request.score_from is None or request.needs_encoding:
        return 0
    return _next_chunk(request.leader, size).num_logits
