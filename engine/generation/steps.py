"""The seam between an engine on an event loop and what makes its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.generation.core import StepTimes
from engine.lifecycle.lifecycle import FailOpen, Lifecycle
from engine.requests.load import LoadSnapshot
from engine.scheduling.output import EngineOutput
from engine.scheduling.sequence import TokenRequest
from engine.step_measures import StepMeasures

Receive = Callable[[list[EngineOutput]], None]


class Steps(Protocol):
    """Makes the steps of an engine: EngineThread, or EngineProcess in a process of its own.

    All is asked on one event loop, and outputs come back there.
    """

    @property
    def lifecycle(self) -> Lifecycle:
        """The lifecycle of the thread or process."""

    async def start(self, receive: Receive, fail_open: FailOpen) -> None:
        """Try the model out, then take requests; raise what fails in the warm-up.

        One call of `receive` brings all outputs of a step. `fail_open` is called if no more come.
        """

    def add(self, request: TokenRequest) -> None:
        """Queue a request."""

    def abort(self, key: int) -> None:
        """Abort a request of which nothing more is wanted."""

    def end(self) -> None:
        """Let it end after the step in flight; what can end with what there is does so."""

    def load(self) -> LoadSnapshot:
        """Return how busy the engine is now."""

    @property
    def times(self) -> StepTimes:
        """The times of all steps so far."""

    @property
    def measures(self) -> StepMeasures:
        """The measures of all steps so far."""
