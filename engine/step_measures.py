"""Measures of an engine's steps, for its metrics."""

from __future__ import annotations

from engine.histogram import SIZE_BOUNDS, STEP_BOUNDS, Histogram


class StepMeasures:
    """The engine's thread adds a step at a time; any thread may read."""

    def __init__(self) -> None:
        self.seconds = Histogram(STEP_BOUNDS)
        self.batch_size = Histogram(SIZE_BOUNDS)  # sequences or items of a step
        self.inter_token = Histogram(STEP_BOUNDS)  # seconds between two tokens of a sequence
        self._last_end = 0.0

    def took_step(
        self, started: float, ended: float, *, batch_size: int, num_continued: int = 0
    ) -> None:
        """Count a step; sequences that go on have had the token before at the end of the last."""
        self.seconds.add(ended - started)
        self.batch_size.add(batch_size)
        if num_continued:
            self.inter_token.add(ended - self._last_end, num_continued)
        self._last_end = ended
