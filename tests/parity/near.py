"""Answers that are equal but for the rounding of their numbers."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

# Tolerance of a sum of log-probabilities over an answer's 20 tokens at most, each as near to itself
# alone as the certificate wants it.
NEAR = {"fp32": 20 * 2e-4, "fp16": 20 * 2e-3}
# Bounds in half precision: how many times as far from float64 a position may be as the eager model
# is in that type, and the lead beyond which rounding turns no token.
MAX_RATIO, DECIDED = 3.0, 4.0


def assert_near(found: Any, expected: Any, allowed: float) -> None:
    """Demand that all is equal but numbers, which are near."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=allowed)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other, allowed)
    elif is_dataclass(expected) and not isinstance(expected, type):
        for field in fields(expected):
            assert_near(getattr(found, field.name), getattr(expected, field.name), allowed)
    else:
        assert found == expected
