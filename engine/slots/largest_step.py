"""Tells how long the largest step of a model takes, so that slow is not mistaken for hung."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator

from engine.config import EngineConfig
from engine.package.manifest import GenerationContract
from engine.slots.batch import Encode, PrefillChunk, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from engine.slots.warm_up import try_out

_NOTHING = ScheduledBatch()
_NUM_LOOKS = 2  # the quicker counts: the other may have waited for cores that were busy


def largest_step_seconds(
    runner: SlotModelRunner,
    contract: GenerationContract,
    config: EngineConfig,
    path: str | os.PathLike[str],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return how long a step full of sources or prompts takes, by one source and one chunk.

    Both are as long as they get. The model has run before: its weights are in memory. The cache is
    empty afterwards. Raises as `warm_up`.
    """
    quickest: dict[tuple[str, int], float] = {}  # by piece and its tokens
    for _ in range(_NUM_LOOKS):
        for what, num_tokens, batch in _pieces(contract, config.prefill_chunk_size):
            started = clock()
            try_out(runner, contract, what, batch, path)
            seconds, piece = clock() - started, (what, num_tokens)
            quickest[piece] = min(quickest.get(piece, math.inf), seconds)
        runner.reset()  # not before: the chunk reads the source
    return max(
        -(-config.max_num_batched_tokens // num_tokens) * seconds
        for (_, num_tokens), seconds in quickest.items()
    )


def _pieces(
    contract: GenerationContract, chunk_size: int
) -> Iterator[tuple[str, int, ScheduledBatch]]:
    """Yield what steps are filled with, what it is called, and its number of tokens."""
    if contract.cross_cache is not None:
        length = contract.cross_cache.max_len
        source = Encode(0, (0,) * length)
        yield "encoding the longest source", length, _NOTHING._replace(encodes=(source,))
    length = min(chunk_size, contract.cache.max_len)
    chunk = PrefillChunk(0, (0,) * length, num_logits=1, source_row=0)
    yield f"a chunk of {length} tokens", length, _NOTHING._replace(chunks=(chunk,), num_top=1)
