"""What a worker and the process of its engine tell each other, beside records of the log.

To the engine goes an Order, and then lists of what is asked: Begin, Compile, Ask and the commands
of the loop. Back comes everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.generation.commands import Command
from engine.generation.core import StepTimes
from engine.generation.parts import MakeParts
from engine.life.step_watch import StepState
from engine.life.trial import Trial
from engine.requests.load import LoadSnapshot
from engine.requests.request import Constraint
from engine.scheduling.output import EngineOutput
from engine.step_measures import StepMeasures


@dataclass(frozen=True)
class Order:
    """What the process is to be the engine of; sent first."""

    name: str  # of the model
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

    trial: Trial


@dataclass(frozen=True)
class Failed:
    """The engine could not be loaded, or not be tried out; its process ends."""

    error: Exception


@dataclass(frozen=True)
class Told:
    """A line for whoever watches the start."""

    line: str


@dataclass(frozen=True)
class Compile:
    """A constraint is to be compiled: a request with it follows if that goes well."""

    number: int
    constraint: Constraint
    given_ids: tuple[int, ...]


@dataclass(frozen=True)
class Compiled:
    """What became of that; None: it can be followed."""

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
    """What a step has brought, and how the engine is where that was not told of late."""

    outputs: list[EngineOutput]
    status: Status | None


Asked = Begin | Compile | Ask | Command
