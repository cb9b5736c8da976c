"""Prompts of drawn token ids and of drawn length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadtest.work.ask import Ask
from loadtest.work.lengths import Lengths


@dataclass(frozen=True)
class Synthetic:
    """Prompts that no request shares with another; the same index gives the same one."""

    input_tokens: Lengths
    token_ids: tuple[int, int] = (100, 999)  # the least and the largest that are drawn
    seed: int = 0

    @property
    def title(self) -> str:
        return f"synthetic, {self.input_tokens.text} input tokens"

    @property
    def num_different(self) -> None:
        return None

    @property
    def times(self) -> tuple[float, ...]:
        return ()

    def ask(self, index: int) -> Ask:
        """Return one prompt."""
        generator = np.random.default_rng((self.seed, index))
        low, high = self.token_ids
        length = self.input_tokens.draw(generator)
        return Ask(tuple(generator.integers(low, high + 1, length).tolist()))

    def next_turn(self, ask: Ask, answer: str) -> Ask | None:
        """Return what is asked behind an answer."""
        return ask.next_turn(answer)
