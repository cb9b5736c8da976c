"""Properties of every engine: its package, device and state."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import EngineConfig
from engine.lifecycle.lifecycle import Lifecycle, WarmUpResult
from engine.lifecycle.thread_lifecycle import ThreadLifecycle
from engine.machine import num_cores
from engine.package.package import Package

# Niceness of a thread that computes the model itself, beside the event loop's. The event loop needs
# little time, and the requests that it hands over make the next step larger: a step that begins
# before them has few sequences, and they wait for the whole of it. A thread that drives a GPU needs
# little time, and the GPU waits for it, so it has none.
NICENESS = 5


class Engine:
    """An engine on a package."""

    def __init__(self, package: Package, config: EngineConfig, lifecycle: Lifecycle) -> None:
        self._package = package
        self._device = device_name(package, config)
        self._num_threads = config.num_threads or num_cores()
        self._lifecycle = lifecycle

    @property
    def package(self) -> Package:
        """The package that is served."""
        return self._package

    @property
    def device(self) -> str:
        """The device of the model: "cpu", or the name of the GPU."""
        return self._device

    @property
    def num_threads(self) -> int:
        """Threads of the CPU that the model may use."""
        return self._num_threads

    @property
    def is_warming(self) -> bool:
        """Whether the model has still to be tried out, before it takes requests."""
        return self._lifecycle.is_warming

    @property
    def healthy(self) -> bool:
        """False if what runs the engine is gone, or stuck, or the last steps all failed."""
        return self._lifecycle.healthy


def device_name(package: Package, config: EngineConfig) -> str:
    """Return where a package runs, if it does: "cpu", or the GPU's name."""
    found = package.manifest.certificate.device
    device = config.device_for(package.manifest.target)
    return found.gpu if found and device == "cuda" else device


def lifecycle_in_thread(
    package: Package, config: EngineConfig, thread_name: str, warm_up: Callable[[], WarmUpResult]
) -> ThreadLifecycle:
    """Return the lifecycle of an engine in a thread of this process.

    `warm_up` runs the model before the first request, and returns what that has shown.
    """
    return ThreadLifecycle(
        package.manifest.name,
        thread_name,
        warm_up,
        config.max_step_seconds,
        niceness=NICENESS if device_name(package, config) == "cpu" else 0,
    )
