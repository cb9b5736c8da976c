"""Options common to all requests of a work that do not set them themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from pydantic import JsonValue

from loadtest.work.ask import Ask, Derived, Method
from loadtest.work.lengths import Lengths


@dataclass(frozen=True)
class Common(Derived):
    """A work whose requests have these options, this method and so many turns."""

    options: Mapping[str, JsonValue] = field(default_factory=dict)
    method: Method | None = None
    num_turns: int = 1  # the prompt of a later turn is the answer to the one before
    output_tokens: Lengths | None = None  # exact length of an answer; None: until the model ends
    seed: int = 0

    @property
    def title(self) -> str:
        out = f", {self.output_tokens.text} output tokens" if self.output_tokens else ""
        turns = f", sessions of {self.num_turns}" if self.num_turns > 1 else ""
        return f"{self.work.title}{out}{turns}"

    def ask(self, index: int) -> Ask:
        """Return one request; the same index has the same length of its answer."""
        ask = self.work.ask(index)
        exact = {}
        if self.output_tokens is not None:
            drawn = self.output_tokens.draw(np.random.default_rng((self.seed, index, 2)))
            exact = exactly(drawn)
        return replace(
            ask,
            options={**self.options, **exact, **ask.options},
            method=ask.method or self.method,
            turns=ask.turns or ("{answer}",) * (self.num_turns - 1),
        )


def exactly(num_tokens: int) -> dict[str, JsonValue]:
    """Return the options with which a model writes so many tokens, whatever they are."""
    return {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "ignore_eos": True}
