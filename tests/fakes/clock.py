"""The clock of tests: it stands until a test moves it."""

from __future__ import annotations


class FakeClock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now  # seconds

    def __call__(self) -> float:
        return self.now
