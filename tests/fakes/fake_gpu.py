"""A GPU where there is none: the fake device of tests/engine, with the kernels of a CPU.

Slow, and without bf16; else all that the engine does on a device is done, and computed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.cuda.device import CudaDevice
from tests.engine.cuda.fake_cuda import FakeCuda
from tests.engine.cuda.fake_device_session import FakeDeviceSession

_MEMORY = 8 * 2**30  # bytes; what is not asked for is not taken
_OPENED = (
    "engine.cuda.device",
    "exporter.verify_device",
)


def put_in(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """Let this process find the GPU, and load graphs on it, until the patch is undone."""
    cuda = FakeCuda(_MEMORY)
    device = cuda.device()

    def load(device: CudaDevice, path: Path) -> FakeDeviceSession:
        return FakeDeviceSession(path, cuda)

    def give(index: int = 0) -> CudaDevice:
        return device

    _put(monkeypatch, _OPENED, "open_device", give)
    monkeypatch.setattr(CudaDevice, "create_session", load)
    # An engine's own process would not find it.
    monkeypatch.setattr(EngineConfig, "has_own_process", lambda config, device: False)
    _put(monkeypatch, ("engine.cuda.certificate",), "cuda_version", lambda: "1.31.1")
    return device


def allow_unshown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a GPU, this or a real one, serve packages of which nothing was shown there."""
    monkeypatch.setattr(
        "engine.cuda.certificate.settings_as_shown", lambda package, device, given: given
    )


def _put(monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...], name: str, what: Any) -> None:
    for module in modules:
        monkeypatch.setattr(importlib.import_module(module), name, what)
