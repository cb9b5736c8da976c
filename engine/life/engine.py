"""What every engine tells of itself: what it serves, where, and how it is."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import EngineConfig
from engine.life.lifecycle import Lifecycle
from engine.life.thread_life import ThreadLife
from engine.life.trial import Trial
from engine.machine import num_cores
from engine.package.package import Package

# Of threads that compute the model themselves, beside the event loop's. That needs little time, and
# what it hands over makes the next step larger: computed first, a step has few sequences, and what
# came before it waits for the whole of it. A GPU waits for its thread, which needs little time too.
NICENESS = 5


class Engine:
    """An engine on a package."""

    def __init__(self, package: Package, config: EngineConfig, life: Lifecycle) -> None:
        self._package = package
        self._device = device_name(package, config)
        self._num_threads = config.num_threads or num_cores()
        self._life = life

    @property
    def package(self) -> Package:
        """What is served."""
        return self._package

    @property
    def device(self) -> str:
        """Where the model runs: "cpu", or the name of the GPU."""
        return self._device

    @property
    def num_threads(self) -> int:
        """Threads of the CPU that the model may use."""
        return self._num_threads

    @property
    def is_warming(self) -> bool:
        """Whether the model has still to be tried out, before it takes requests."""
        return self._life.is_warming

    @property
    def healthy(self) -> bool:
        """False if what runs the engine is gone, or stuck, or the last steps all failed."""
        return self._life.healthy


def device_name(package: Package, config: EngineConfig) -> str:
    """Return where a package runs, if it does: "cpu", or the GPU's name."""
    found = package.manifest.certificate.device
    device = config.device_for(package.manifest.target)
    return found.gpu if found and device == "cuda" else device


def life_in_thread(
    package: Package, config: EngineConfig, thread_name: str, warm_up: Callable[[], Trial]
) -> ThreadLife:
    """Return the life of an engine in a thread of this process.

    `warm_up` runs the model before the first request, and returns what that has shown.
    """
    return ThreadLife(
        package.manifest.name,
        thread_name,
        warm_up,
        config.max_step_seconds,
        niceness=NICENESS if device_name(package, config) == "cpu" else 0,
    )
