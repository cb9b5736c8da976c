"""Chooses how much is tried: lengths from 1 to the limit, prompts of each, steps behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from engine.config import EngineConfig
from engine.package.manifest import Proof
from exporter.samples import SEED

ALL_LENGTHS_UP_TO = 64
NUM_LENGTHS = 15  # tried if the model's limit is higher
BATCH_SIZES = (2, 5, 8)  # and 1: every case alone
# Tokens of the sources or texts that are tried in groups of every size, as few as mean something.
_COUNTED_LENGTH = 4
MOST_ROWS = EngineConfig().max_num_seqs  # an engine's step has them, unless a person chose more
_MOST_TOKENS = EngineConfig().max_num_batched_tokens
# Numbers of likeliest tokens that a step may be asked for: engine/scheduling/step.py rounds up
# to a power of two, engine/sampling/top_k.py ends at MAX_COLUMNS.
NUM_TOPS = (256, 1, 16, 2, 128, 4, 64, 8, 32)

Covered = dict[str, list[int] | int]  # as in engine.package.Certificate

MIN_STEPS = 4  # tokens behind a prompt, however large the model is
# Parameters times tokens of the images in batches of every size: of a large model fewer are tried.
MAX_COUNTING = 1.5e12


@dataclass(frozen=True)
class Level:
    """How much is tried of a model."""

    per_length: int  # prompts or texts; a large model is tried with fewer
    steps: int  # tokens behind a prompt; likewise
    # Parameters of the model times tokens of all its cases, above which it is tried with fewer. A
    # case's prompt is computed five times, once of them in float64.
    arithmetic: float
    # Parameters times cases times steps: a step reads all weights, for every case alone and for the
    # groups that it is in.
    stepping: float


# GPT-2 (124M, 1024 positions) comes to 2.1e12 with four prompts of each of 15 lengths.
_STANDARD = Level(8, 32, arithmetic=2.5e12, stepping=8e10)
LEVELS: Mapping[Proof, Level] = MappingProxyType(
    {
        "quick": Level(2, 8, arithmetic=8e11, stepping=2e10),
        "standard": _STANDARD,
        "full": _STANDARD,  # and a case of every length besides
    }
)


def affordable_steps(level: Level, num_parameters: int, num_cases: int) -> int:
    """Return how many tokens a case may generate."""
    steps = level.steps
    while steps > MIN_STEPS and num_parameters * num_cases * steps > level.stepping:
        steps //= 2
    return steps


def prefill_chunk(limit: int) -> int:
    """Return the chunk size to try: the engine's default, smaller if prompts hardly exceed it."""
    return min(128, max(3, limit // 4))


def first_lengths(limit: int) -> list[int]:
    """Return the lengths that are tried first: the shortest, those at a chunk's end, the longest.

    They are all of a quick proof.
    """
    chunk = prefill_chunk(limit)
    return sorted(length for length in {1, 2, 16, chunk, chunk + 1, limit} if length <= limit)


def spread_lengths(limit: int, proof: Proof = "standard") -> list[int]:
    """Return lengths from 1 to `limit`: all of them, or those at every edge and some between."""
    if proof == "quick":
        return first_lengths(limit)
    if limit <= ALL_LENGTHS_UP_TO:
        return list(range(1, limit + 1))
    chunk = prefill_chunk(limit)
    edges = {*first_lengths(limit), 3, chunk - 1, limit - 1} - {16}
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
