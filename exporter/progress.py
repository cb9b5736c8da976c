"""The form in which long work tells how far it has come."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Is told how far something has come."""

    def __call__(
        self, done: int, total: int, what: str = "", seconds_left: float | None = None
    ) -> None:
        """Take what is being done, how much of it is done, and how long the rest takes."""


def no_progress(done: int, total: int, what: str = "", seconds_left: float | None = None) -> None:
    """Discard progress."""
