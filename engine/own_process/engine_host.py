"""The process of an engine, which EngineProcess starts.

Its main thread loads the model, tries it out and runs the loop; another one takes in what is asked,
and ends the process as soon as the worker is gone, whatever the model is at.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import queue
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from logging.handlers import QueueHandler
from typing import cast

from engine.errors import EngineFailure, TokenweirError
from engine.generation.engine_loop import Abort, EngineLoop, Stop
from engine.generation.parts import EngineParts
from engine.lifecycle.step_watch import StepWatch
from engine.own_process.messages import (
    Ask,
    Asked,
    Begin,
    Begun,
    Compile,
    Compiled,
    Failed,
    Loaded,
    Progress,
    StartMessage,
    Status,
    StepOutputs,
)
from engine.own_process.wire import Wire
from engine.scheduling.output import EngineOutput, FailedOutput
from engine.scheduling.sequence import TokenRequest

STATUS_PAUSE = 0.05  # seconds between two that go with outputs
_log = logging.getLogger(__name__)


class EngineHost:
    """Runs the loop of an engine for the worker at the other end of a wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._is_to_begin: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._status_sent_at = 0.0

    def run(self) -> None:
        """Load, try out and serve until the worker says that it is enough."""
        start = cast(StartMessage, self._wire.receive())
        self._name = start.name
        os.nice(start.niceness)
        logging.root.addHandler(_ToWorker(self._wire))
        logging.root.setLevel(start.log_level)
        threading.Thread(target=self._listen, name="asked", daemon=True).start()
        try:
            self._load(start)
            if not self._is_to_begin.get():
                return
            result = self._parts.warm_up()
        except Exception as error:
            self._wire.send(Failed(self._passed_on(error)))
            return
        gc.collect()
        gc.freeze()  # the collector need not look at the model again and again
        self._wire.send(Begun(result))
        self._loop.run()

    def _load(self, start: StartMessage) -> None:
        self._parts: EngineParts = start.make(lambda line: self._wire.send(Progress(line)))
        self._watch = StepWatch(start.name, math.inf)  # the worker says what is too long
        self._sending = threading.Lock()  # no status goes behind a newer one: two threads send them
        self._loop = EngineLoop(
            self._parts.core, start.name, self._watch, self._hand_over, rest=self._send_status
        )
        self._wire.send(Loaded(self._parts.config))

    def _listen(self) -> None:
        try:
            while True:
                for asked in cast(list[Asked], self._wire.receive()):
                    self._take(asked)
        except EOFError:
            os._exit(0)
        except Exception:
            _log.exception("the process of the engine of %s fails", self._name)
            os._exit(1)

    def _take(self, asked: Asked) -> None:
        match asked:
            case TokenRequest():
                self._add(asked)
            case Abort():
                self._loop.abort(asked.key)
            case Compile():
                self._compiling.submit(self._compile, asked)
            case Ask():
                self._send_status()
            case Begin():
                self._is_to_begin.put(True)
            case Stop():
                self._is_to_begin.put(False)
                self._loop.end()

    def _add(self, asked: TokenRequest) -> None:
        """Let a request be scheduled, with the constraint that could not cross."""
        params = asked.params
        if params.constraint is not None:
            given = (*asked.target_ids, *params.forced_begin)
            try:
                matcher = self._parts.constraints.compile(params.constraint, given)
            except Exception as error:  # though it went well when the worker asked
                self._hand_over([FailedOutput(asked.key, self._passed_on(error))])
                return
            asked = replace(asked, matcher=matcher)
        self._loop.add(asked)

    def _compile(self, asked: Compile) -> None:
        error: Exception | None = None
        try:
            self._parts.constraints.compile(asked.constraint, asked.given_ids)
        except Exception as found:
            error = self._passed_on(found)
        self._wire.send(Compiled(asked.number, error))

    def _hand_over(self, outputs: list[EngineOutput]) -> bool:
        """Send the outputs of a step; blocks while the worker is behind (back pressure)."""
        now = time.monotonic()
        has_more = self._parts.core.scheduler.has_requests
        is_due = not has_more or now >= self._status_sent_at + STATUS_PAUSE
        with self._sending:
            self._wire.send(StepOutputs(outputs, self._status(now) if is_due else None))
        return True

    def _send_status(self) -> None:
        with self._sending:
            self._wire.send(self._status(time.monotonic()))

    def _status(self, now: float) -> Status:
        self._status_sent_at, loop = now, self._loop
        return Status(loop.load(), loop.num_added, self._watch.state, loop.times, loop.measures)

    def _passed_on(self, error: Exception) -> TokenweirError:
        """Return an error as the worker is told of it; the log has what nobody expected."""
        if isinstance(error, TokenweirError):
            return error
        _log.exception("the process of the engine of %s has failed", self._name)
        return EngineFailure(f"the engine of {self._name}: {type(error).__name__}: {error}")


class _ToWorker(QueueHandler):
    """Sends records of the log, which the worker writes with its own."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(cast("queue.SimpleQueue[object]", None))
        self._wire = wire

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record, made so that it can be pickled."""
        self._wire.send(record)


def main() -> None:
    """Be the engine of the process that has the other end of a socket, by its number."""
    status = 1
    try:
        EngineHost(Wire(socket.socket(fileno=int(sys.argv[1])))).run()
        status = 0
    except (EOFError, ConnectionError):
        pass  # the worker is gone
    except Exception:
        _log.exception("the engine has stopped")
    finally:
        os._exit(status)  # the system puts away what the model has, and sooner
