"""The loop of a generating engine: commands in through a queue, outputs of a step out at once."""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace

from engine.errors import DeadlineExpired, EngineFailure, Overloaded, TokenweirError
from engine.generation.core import EngineCore, StepTimes
from engine.lifecycle.lifecycle import draining, failure
from engine.requests.load import LoadSnapshot
from engine.scheduling.output import EngineOutput, FailedOutput
from engine.scheduling.sequence import TokenRequest
from engine.step_measures import StepMeasures

KEEP_MEMORY = 1.0  # seconds before freed pages go back; a new request may reuse them
# A thread lets another one of its process go on after so long. Python's own setting may keep the
# engine from beginning the next step while a device computes, for several steps.
_SWITCH_SECONDS = 0.0005
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Abort:
    """Nothing more is wanted of a request."""

    key: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The loop is to end."""


Command = TokenRequest | Abort | Stop


class EngineLoop:
    """Runs an EngineCore, and sleeps while there is nothing to do.

    Commands take effect between two steps. The outputs of a step are handed over at once.
    """

    def __init__(
        self,
        core: EngineCore,
        name: str,
        watch: AbstractContextManager[None],
        hand_over: Callable[[list[EngineOutput]], bool],
        *,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        """`name` is the model's; every step is inside of `watch`.

        `hand_over` returns False if nobody takes outputs any more; `rest` is called before the
        loop waits for a command.
        """
        self._core = core
        self._name = name
        self._watch = watch
        self._pass_on = hand_over
        self._rest = rest
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.num_added = 0
        self._num_taken = 0  # those that the scheduler has

    def add(self, request: TokenRequest) -> None:
        """Queue a request."""
        self.num_added += 1
        self._commands.put(request)

    def abort(self, key: int) -> None:
        """Let a request end, of which nothing more is wanted."""
        self._commands.put(Abort(key))

    def end(self) -> None:
        """Let `run` return after the step in flight; what can end with what there is does so."""
        self._commands.put(Stop())

    @property
    def has_commands(self) -> bool:
        """Whether commands wait."""
        return not self._commands.empty()

    def load(self) -> LoadSnapshot:
        """Return how busy the engine is now."""
        load = self._core.scheduler.load()
        return replace(load, waiting=load.waiting + self.num_added - self._num_taken)

    @property
    def times(self) -> StepTimes:
        """The times of all steps so far."""
        return self._core.times

    @property
    def measures(self) -> StepMeasures:
        """The measures of all steps so far."""
        return self._core.measures

    def run(self) -> None:
        """Serve until it is told to stop."""
        if self._core.runs_ahead:
            sys.setswitchinterval(_SWITCH_SECONDS)
        while self._take_commands():
            self._step()

    def _take_commands(self) -> bool:
        """Carry out what has been asked for, waiting if there is nothing to do; False: stop."""
        scheduler = self._core.scheduler
        while not self._core.has_requests or self.has_commands:
            command = self._next_command()
            if command is None:
                return True
            if isinstance(command, Stop):
                self._hand_over(scheduler.drain(lambda request_id: draining()))
                return False
            self._carry_out(command)
        return True

    def _next_command(self) -> Command | None:
        """Wait for a command; None if for a while none comes, and memory is to be put in order."""
        if self.has_commands:
            return self._commands.get()
        self._rest()
        if self._core.scheduler.has_work:
            with suppress(queue.Empty):
                return self._commands.get(timeout=KEEP_MEMORY)
            return None
        self._check_integrity()
        return self._commands.get()

    def _carry_out(self, command: Command) -> None:
        scheduler = self._core.scheduler
        match command:
            case TokenRequest():
                self._num_taken += 1
                try:
                    scheduler.add(command)
                except (Overloaded, DeadlineExpired) as error:
                    self._hand_over([FailedOutput(command.key, error)])
            case Abort():
                scheduler.abort(command.key)

    def _step(self) -> None:
        self._hand_over(self._core.scheduler.take_outputs())
        try:
            with self._watch:
                outputs = self._core.step()
        except Exception:
            outputs = self._recovered(f"a step of {self._name} failed")
        self._hand_over(outputs)

    def _check_integrity(self) -> None:
        """Find what a fault has left behind, and empty the engine: else it is missing for good."""
        try:
            self._core.check_integrity()
        except EngineFailure:
            self._hand_over(self._recovered(f"{self._name} was emptied"))

    def _recovered(self, what: str) -> list[EngineOutput]:
        """Fail all requests; log what has happened, and to whom, by the ids that they know."""
        failed: list[str] = []

        def describe(request_id: str) -> TokenweirError:
            failed.append(request_id)
            return failure(request_id)

        outputs = self._core.recover(describe)
        _log.exception("%s; requests: %s", what, ", ".join(failed) or "none")
        return outputs

    def _hand_over(self, outputs: list[EngineOutput]) -> None:
        if outputs and not self._pass_on(outputs):
            self.end()
