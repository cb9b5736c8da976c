"""The parts of an engine, wherever its steps are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.generation.core import EngineCore
from engine.generation.request_reader import Constraints
from engine.lifecycle.lifecycle import WarmUpResult
from engine.text.tokenizer import SourceAndTarget

Tell = Callable[[str], None]  # takes progress, a line at a time


@dataclass(frozen=True)
class EngineParts:
    """All of an engine but its streams."""

    core: EngineCore
    tokenizers: SourceAndTarget
    constraints: Constraints
    config: EngineConfig  # with what the device has room for
    warm_up: Callable[[], WarmUpResult]  # runs the model before the first request


MakeParts = Callable[[Tell], EngineParts]  # is called in the process that runs them
