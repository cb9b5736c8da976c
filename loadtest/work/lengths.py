"""Numbers of tokens, drawn from a distribution that a person has typed."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.errors import LoadTestError

_FORMS = "such as 128, 64-256, lognormal:180,0.6 or @histogram.json"
_MAX_TOKENS = 2**24


@dataclass(frozen=True)
class Lengths:
    """A distribution of numbers of tokens, each at least 1."""

    text: str  # as it was typed
    values: tuple[int, ...] = ()  # a histogram's; a range's two ends
    weights: tuple[float, ...] = ()  # a histogram's
    median: float = 0.0  # a lognormal distribution's
    sigma: float = 0.0

    def draw(self, generator: np.random.Generator) -> int:
        """Return one number."""
        if self.median:
            drawn = generator.lognormal(math.log(self.median), self.sigma)
            return min(max(1, round(drawn)), _MAX_TOKENS)
        if self.weights:
            shares = np.array(self.weights) / sum(self.weights)
            return int(generator.choice(self.values, p=shares))
        return int(generator.integers(self.values[0], self.values[-1] + 1))


def parse_lengths(text: str) -> Lengths:
    """Return the distribution: `128`, `64-256` (each alike), `lognormal:MEDIAN,SIGMA`, `@FILE`.

    A file holds a JSON object of numbers of tokens and how often they come: {"64": 3, "512": 1}.
    Raises LoadTestError for anything else.
    """
    if text.startswith("@"):
        return _histogram(text)
    if found := re.fullmatch(r"lognormal:([0-9.]+),([0-9.]+)", text):
        return _lognormal(text, *found.groups())
    if not (found := re.fullmatch(r"(\d{1,8})(?:-(\d{1,8}))?", text)):
        raise LoadTestError(f"{text[:100]!r} is not a number of tokens; give one {_FORMS}")
    low = int(found[1])
    return _checked(Lengths(text, (low, int(found[2] or low))))


def _lognormal(text: str, median: str, sigma: str) -> Lengths:
    try:
        found = Lengths(text, median=float(median), sigma=float(sigma))
    except ValueError as error:
        raise LoadTestError(f"{text[:100]!r} has no two numbers; give {_FORMS}") from error
    if not 1 <= found.median <= _MAX_TOKENS or not found.sigma <= 5:
        raise LoadTestError(
            f"{text[:100]!r}: the median is to be 1 to {_MAX_TOKENS:,} tokens, sigma 0 to 5"
        )
    return found


def _histogram(text: str) -> Lengths:
    path = Path(text[1:])
    try:
        table = {int(key): float(value) for key, value in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise LoadTestError(
            f'cannot read numbers of tokens from {path}: {error}; give {{"64": 3, "512": 1}}'
        ) from error
    found = Lengths(text, tuple(table), tuple(table.values()))
    if not table or min(table.values()) < 0 or not 0 < sum(table.values()) < math.inf:
        raise LoadTestError(f"{path} has no weights above 0; give each length how often it comes")
    return _checked(found)


def _checked(lengths: Lengths) -> Lengths:
    if min(lengths.values) < 1 or max(lengths.values) > _MAX_TOKENS:
        raise LoadTestError(f"{lengths.text[:100]!r}: give numbers from 1 to {_MAX_TOKENS:,}")
    if not lengths.weights and lengths.values[0] > lengths.values[-1]:
        raise LoadTestError(f"{lengths.text!r} ends below its beginning; give the smaller first")
    return lengths
