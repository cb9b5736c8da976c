"""Messages between a worker and the process of its engine, beside records of the log.

The worker sends a StartMessage, and then lists of Begin, Compile, Ask and the commands of the loop.
The process sends everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.generation.core import StepTimes
from engine.generation.engine_loop import Command
from engine.generation.parts import MakeParts
from engine.lifecycle.lifecycle import WarmUpResult
from engine.lifecycle.step_watch import StepState
from engine.requests.load import LoadSnapshot
from engine.requests.request import Constraint
from engine.scheduling.output import EngineOutput
from engine.step_measures import StepMeasures


@dataclass(frozen=True)
class StartMessage:
    """The engine that the process is to be; sent first."""

    name: str  # the model's
    make: MakeParts
    niceness: int
    log_level: int


@dataclass(frozen=True)
class Loaded:
    """The parts are there."""

    config: EngineConfig


@dataclass(frozen=True)
class Begin:
    """The model is to be tried out, then served."""


@dataclass(frozen=True)
class Begun:
    """The model was tried out, and is served."""

    result: WarmUpResult


@dataclass(frozen=True)
class Failed:
    """The engine could not be loaded, or not be tried out; its process ends."""

    error: Exception


@dataclass(frozen=True)
class Progress:
    """A line of progress while the engine starts."""

    line: str


@dataclass(frozen=True)
class Compile:
    """A constraint is to be compiled: a request with it follows if that goes well."""

    number: int
    constraint: Constraint
    given_ids: tuple[int, ...]


@dataclass(frozen=True)
class Compiled:
    """The result of Compile; None: the constraint can be followed."""

    number: int
    error: Exception | None


@dataclass(frozen=True)
class Ask:
    """The status is wanted."""


@dataclass(frozen=True)
class Status:
    """How the engine is."""

    load: LoadSnapshot
    num_added: int  # requests that it has been given
    step: StepState
    times: StepTimes
    measures: StepMeasures


@dataclass(frozen=True)
class StepOutputs:
    """The outputs of a step, and the engine's status if it was not sent of late."""

    outputs: list[EngineOutput]
    status: Status | None


Asked = Begin | Compile | Ask | Command
