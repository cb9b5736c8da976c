"""Random numbers by counter: any of them at any time."""

from __future__ import annotations

import numpy as np


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
