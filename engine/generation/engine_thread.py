"""The thread of a generating engine: commands in through a queue, outputs of a step out at once."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from engine.errors import DeadlineExpired, EngineFailure, Overloaded, TokenweirError
from engine.generation.core import EngineCore
from engine.life.lifecycle import Lifecycle, draining, failure
from engine.requests.load import LoadSnapshot
from engine.scheduling.output import EngineOutput, FailedOutput
from engine.scheduling.sequence import TokenRequest

MOMENT = 1.0  # seconds; who comes sooner finds the memory of who has just ended
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Abort:
    key: int


@dataclass(frozen=True, slots=True)
class _FinishSequence:
    key: int
    index: int


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = TokenRequest | _Abort | _FinishSequence | _Stop


class EngineThread:
    """Runs an EngineCore, and sleeps while there is nothing to do.

    Commands take effect between two steps. What a step brings comes back in one call of `receive`
    on the event loop.
    """

    def __init__(
        self, core: EngineCore, life: Lifecycle, receive: Callable[[list[EngineOutput]], None]
    ) -> None:
        self._core = core
        self._life = life
        self._receive = receive
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._num_added = 0
        self._num_taken = 0  # by the thread

    def add(self, request: TokenRequest) -> None:
        """Let a request be scheduled."""
        self._num_added += 1
        self._commands.put(request)

    def abort(self, key: int) -> None:
        """Let a request end, of which nothing more is wanted."""
        self._commands.put(_Abort(key))

    def finish_sequence(self, key: int, index: int) -> None:
        """Let a sequence end: a stop string was found in its text."""
        self._commands.put(_FinishSequence(key, index))

    def stop(self) -> None:
        """Let `run` return after the step in flight; what can end with what there is does so."""
        self._commands.put(_Stop())

    @property
    def has_commands(self) -> bool:
        """Whether commands wait."""
        return not self._commands.empty()

    def load(self) -> LoadSnapshot:
        """Return how busy the engine is now."""
        load = self._core.scheduler.load()
        return replace(load, waiting=load.waiting + self._num_added - self._num_taken)

    def run(self) -> None:
        """Serve until the thread is told to stop."""
        while self._take_commands():
            self._step()

    def _take_commands(self) -> bool:
        """Carry out what has been asked for, waiting if there is nothing to do; False: stop."""
        scheduler = self._core.scheduler
        while not self._core.has_requests or self.has_commands:
            command = self._next_command()
            if command is None:
                return True
            if isinstance(command, _Stop):
                self._hand_over(scheduler.drain(lambda request_id: draining()))
                return False
            self._carry_out(command)
        return True

    def _next_command(self) -> _Command | None:
        """Wait for a command; None if for a while none comes, and memory is to be put in order."""
        if self.has_commands:
            return self._commands.get()
        if self._core.scheduler.has_work:
            with suppress(queue.Empty):
                return self._commands.get(timeout=MOMENT)
            return None
        self._check_integrity()
        return self._commands.get()

    def _carry_out(self, command: _Command) -> None:
        scheduler = self._core.scheduler
        match command:
            case TokenRequest():
                self._num_taken += 1
                try:
                    scheduler.add(command)
                except (Overloaded, DeadlineExpired) as error:
                    self._hand_over([FailedOutput(command.key, error)])
            case _Abort():
                scheduler.abort(command.key)
            case _FinishSequence():
                scheduler.finish_sequence(command.key, command.index)

    def _step(self) -> None:
        self._hand_over(self._core.scheduler.take_outputs())
        try:
            with self._life.step():
                outputs = self._core.step()
        except Exception:
            outputs = self._recovered(f"a step of {self._life.name} failed")
        self._hand_over(outputs)

    def _check_integrity(self) -> None:
        """Find what a fault has left behind, and empty the engine: else it is missing for good."""
        try:
            self._core.check_integrity()
        except EngineFailure:
            self._hand_over(self._recovered(f"{self._life.name} was emptied"))

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
        if outputs and not self._life.call_on_loop(self._receive, outputs):
            self.stop()
