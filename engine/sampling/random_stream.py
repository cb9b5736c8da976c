"""Random numbers by counter: any of them at any time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_FACTORS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], np.uint64)
_NUM_ROUNDS = 10
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_FACTORS_HIGH, _FACTORS_LOW = _FACTORS >> _HALF, _FACTORS & _LOW
_NUM_AHEAD = 32  # positions whose numbers are made together
_FEW = 4  # sequences, of which it would take longer than one by one


class SequenceDraws:
    """The numbers of one sequence, those of its next positions made together."""

    __slots__ = ("_numbers", "_start", "index", "seed")

    def __init__(self, seed: int, index: int) -> None:
        self.seed, self.index = seed, index
        self._start = 0
        self._numbers: list[float] = []

    def has(self, position: int) -> bool:
        """Say whether the number of a position is there."""
        return 0 <= position - self._start < len(self._numbers)

    def at(self, position: int) -> float:
        """Return the number of a position that is there."""
        return self._numbers[position - self._start]

    def put(self, start: int, numbers: list[float]) -> None:
        """Take in the numbers from a position on."""
        self._start, self._numbers = start, numbers


class RandomStream:
    """The Philox generator of Salmon et al. 2011.

    A number depends on nothing but its three arguments, so that a token can be drawn again
    whatever shared the batch with it, and by another process.
    """

    def __init__(self) -> None:
        self._generator = np.random.Philox(key=0)
        self._state = self._generator.state

    def uniform(self, seed: int, sequence_index: int, position: int) -> float:
        """Return a number in [0, 1), a multiple of 2**-53."""
        inner = self._state["state"]
        inner["key"][0] = seed
        inner["counter"][1:3] = position, sequence_index
        self._generator.state = self._state
        return float(int(self._generator.random_raw()) >> 11) * 2.0**-53

    def uniforms(self, draws: Sequence[SequenceDraws], positions: Sequence[int]) -> list[float]:
        """Return for each sequence the number of a position, as `uniform` does."""
        missing = [(one, at) for one, at in zip(draws, positions, strict=True) if not one.has(at)]
        if 0 < len(missing) < _FEW:
            for one, at in missing:
                one.put(at, [self.uniform(one.seed, one.index, at)])
        elif missing:
            _make_ahead(missing)
        return [one.at(at) for one, at in zip(draws, positions, strict=True)]


def _make_ahead(missing: Sequence[tuple[SequenceDraws, int]]) -> None:
    """Make the numbers of each of these from a position on."""
    seeds = np.array([one.seed for one, _ in missing], np.uint64)
    indices = np.array([one.index for one, _ in missing], np.uint64)
    starts = np.array([start for _, start in missing], np.uint64)
    positions: Words = starts[:, None] + np.arange(_NUM_AHEAD).astype(np.uint64)  # [n, _NUM_AHEAD]
    words = _first_words(
        np.repeat(seeds, _NUM_AHEAD), np.repeat(indices, _NUM_AHEAD), positions.reshape(-1)
    )
    numbers = (words >> np.uint64(11)).reshape(positions.shape).astype(np.float64) * 2.0**-53
    for (one, start), row in zip(missing, numbers, strict=True):
        one.put(start, row.tolist())


def _first_words(seeds: Words, indices: Words, positions: Words) -> Words:
    """Return the first word of Philox4x64-10 at counters (1, position, index, 0), keys (seed, 0).

    All are [n]. numpy counts up before it makes a block, so its first counter is 1.
    """
    even: Words = np.stack([np.ones_like(positions), indices])  # words 0 and 2, [2, n]
    odd: Words = np.stack([positions, np.zeros_like(positions)])  # words 1 and 3
    keys: Words = np.stack([seeds, np.zeros_like(seeds)])
    for _ in range(_NUM_ROUNDS):
        high = _high_products(even)
        odd, even = (even * _FACTORS)[::-1], high[::-1] ^ odd ^ keys
        keys = keys + _KEY_STEPS
    first: Words = even[0]
    return first


def _high_products(words: Words) -> Words:
    """Return the upper 64 bits of the products with the factors, [2, n]."""
    low: Words = words & _LOW
    high: Words = words >> _HALF
    low_high = _FACTORS_LOW * high
    middle = (_FACTORS_LOW * low >> _HALF) + (low_high & _LOW) + _FACTORS_HIGH * low
    product: Words = _FACTORS_HIGH * high + (low_high >> _HALF) + (middle >> _HALF)
    return product
