"""Prefix cache: how much of a prompt's beginning another row holds already."""

from __future__ import annotations

from collections.abc import Iterable

from engine.config import EngineConfig
from engine.package.manifest import GenerationContract
from engine.scheduling.sequence import Request, Sequence
from engine.slots.table import CachedPrefix

Holder = Sequence | CachedPrefix


class PrefixCache:
    """Finds the beginnings that can be copied.

    They are whole chunks: the chunks behind them are then those that the request would compute
    without a copy, and give the same bits. Logits are not kept, so that one token at least is left
    to be computed, and a request that scores its prompt computes all. An encoder-decoder has none:
    everything depends on its source.
    """

    # Elsewhere cut prompts give other bits: in fp32, onnxruntime 1.31 computes the last row of a
    # call alone if the number of rows is 1 above a multiple of its tile (16 to 64).

    def __init__(self, config: EngineConfig, contract: GenerationContract) -> None:
        self._is_on = config.reuse_prefixes and contract.cross_cache is None
        self._chunk_size = config.prefill_chunk_size

    def longest(
        self, request: Request, holders: Iterable[tuple[Holder, int]]
    ) -> tuple[Holder | None, int]:
        """Return which row begins like the prompt for longest, and for how many positions.

        `holders` come with how many of their first positions may be used.
        """
        tokens = request.reading[0].tokens
        best: tuple[Holder | None, int] = (None, 0)
        most = self._whole_chunks(len(tokens) - 1)
        if not self._is_on or request.score_from is not None or most == 0:
            return best
        for holder, limit in holders:
            length = self._num_common(tokens, holder.tokens, min(limit, most))
            if length > best[1]:
                best = holder, length
        return best

    def num_reusable(self, sequence: Sequence) -> int:
        """Return how many first positions of a sound row another prompt may use."""
        if not self._is_on:
            return 0
        return self._whole_chunks(min(sequence.num_prompt, sequence.num_computed))

    def _whole_chunks(self, num_tokens: int) -> int:
        return num_tokens // self._chunk_size * self._chunk_size

    def _num_common(self, one: list[int], other: list[int], limit: int) -> int:
        """Return how many of the first tokens are equal, in whole chunks and at most `limit`."""
        size = self._chunk_size
        for start in range(0, limit, size):
            if one[start : start + size] != other[start : start + size]:
                return start
        return limit
