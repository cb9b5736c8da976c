"""The steps of a generating engine in a thread of the process that reads its streams."""

from __future__ import annotations

from engine.generation.core import EngineCore
from engine.generation.engine_loop import EngineLoop
from engine.generation.steps import Receive
from engine.lifecycle.lifecycle import FailOpen
from engine.lifecycle.thread_lifecycle import ThreadLifecycle
from engine.scheduling.output import EngineOutput


class EngineThread(EngineLoop):
    """An EngineLoop in a thread of this process; see Steps."""

    def __init__(self, core: EngineCore, lifecycle: ThreadLifecycle) -> None:
        super().__init__(core, lifecycle.name, lifecycle.step(), self._on_loop)
        self.lifecycle = lifecycle

    async def start(self, receive: Receive, fail_open: FailOpen) -> None:
        """Try the model out, then take requests; see Steps."""
        self._receive = receive
        await self.lifecycle.start(self.run, fail_open)

    def _on_loop(self, outputs: list[EngineOutput]) -> bool:
        return self.lifecycle.call_on_loop(self._receive, outputs)
