"""Chooses what a certificate tries: lengths from 1 to the limit, and token ids to fill them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from engine.config import EngineConfig
from exporter.samples import SEED

ALL_LENGTHS_UP_TO = 64
NUM_LENGTHS = 15  # of a model with a higher limit

BATCH_SIZES = (2, 5, 8)  # and 1: every case alone
# Tokens of the sources or texts that are tried in groups of every size, as few as mean something.
_COUNTED_LENGTH = 4
MOST_ROWS = EngineConfig().max_num_seqs  # of a step of the engine, unless a person chose more
_MOST_TOKENS = EngineConfig().max_num_batched_tokens
# Of the likeliest tokens, as many as a step may be asked for: engine/scheduling/step.py rounds up
# to a power of two, engine/sampling/top_k.py ends at MAX_COLUMNS.
NUM_TOPS = (256, 1, 16, 2, 128, 4, 64, 8, 32)

Progress = Callable[[int, int], None]  # done, in all
Covered = dict[str, list[int] | int]  # as in engine.package.Certificate

MAX_PER_LENGTH = 8  # prompts or texts
MAX_STEPS = 32  # tokens behind a prompt

# Parameters of the model times tokens of all its cases: a model that generates is tried with 4, 2
# or 1 prompts of each length where this is exceeded. A case's prompt is computed three times, once
# of them in float64. GPT-2 (124M, 1024 positions) comes to 2.1e12 with four prompts of each length,
# and is exported in less than 3 minutes on two cores (171 s on an Intel Xeon).
MAX_ARITHMETIC = 2.5e12
# Parameters times cases times steps: a step reads all weights, for every case alone and for the
# groups that it is in. Where this is exceeded a case has fewer steps, but never below MIN_STEPS.
MAX_STEPPING = 8e10
MIN_STEPS = 4
# Parameters times tokens of the images in batches of every size: of a large model fewer are tried.
MAX_COUNTING = 1.5e12


def no_progress(done: int, total: int) -> None:
    """Tell nobody."""


def affordable_prompts(num_parameters: int, num_tokens: Callable[[int], int]) -> int:
    """Return how many prompts of each length to try; all cases have `num_tokens` of them."""
    prompts = MAX_PER_LENGTH
    while prompts > 1 and num_parameters * num_tokens(prompts) > MAX_ARITHMETIC:
        prompts //= 2
    return prompts


def affordable_steps(num_parameters: int, num_cases: int) -> int:
    """Return how many tokens a case may generate."""
    steps = MAX_STEPS
    while steps > MIN_STEPS and num_parameters * num_cases * steps > MAX_STEPPING:
        steps //= 2
    return steps


def prefill_chunk(limit: int) -> int:
    """Return the chunk size to try: the engine's default, smaller if prompts hardly exceed it."""
    return min(128, max(3, limit // 4))


def spread_lengths(limit: int) -> list[int]:
    """Return lengths from 1 to `limit`: all of them, or those at every edge and some between."""
    if limit <= ALL_LENGTHS_UP_TO:
        return list(range(1, limit + 1))
    chunk = prefill_chunk(limit)
    edges = {1, 2, 3, chunk - 1, chunk, chunk + 1, limit - 1, limit}
    between = np.geomspace(4, limit - 2, NUM_LENGTHS).astype(int).tolist()
    rng = np.random.default_rng(SEED)
    free = [length for length in dict.fromkeys(between) if length not in edges]
    chosen = rng.permutation(free)[: NUM_LENGTHS - len(edges)].tolist()
    return sorted({*edges, *chosen})


def counted_length(lengths: Iterable[int]) -> int:
    """Return at which of these lengths sources or texts are tried in groups of every size."""
    return min(
        lengths, key=lambda length: (length < _COUNTED_LENGTH, abs(length - _COUNTED_LENGTH))
    )


def affordable_sizes(most: int, arithmetic: float) -> list[int]:
    """Return sizes of batches up to `most`: every one, or odd ones of every second, fourth, ...

    An item takes so much `arithmetic`, its tokens times the parameters.
    """
    step = 1
    while step < most and arithmetic * (most + sum(range(most - 1, 1, -step))) > MAX_COUNTING:
        step *= 2
    return [most, *range(most - 1, 1, -step)]


def largest_batch(length: int) -> int:
    """Return how many sources or texts of a length the engine takes in one step at most."""
    return max(1, min(MOST_ROWS, _MOST_TOKENS // length))
