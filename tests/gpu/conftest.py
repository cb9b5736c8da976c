"""Packages for the GPU of this machine, certified there; `make test GPU=1` runs what is here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.cuda.device import CudaDevice, open_device
from exporter.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from exporter.tasks import build_task
from server.cli.app import run
from tests.parity.conftest import random_model


class Certified(NamedTuple):
    """A checkpoint and its package, which holds the certificate of the device."""

    checkpoint: Checkpoint
    package: Path


@pytest.fixture(scope="session")
def device() -> CudaDevice:
    """The GPU; without one, or without what it needs, every test here fails."""
    return open_device()


@pytest.fixture(scope="session")
def certified(
    device: CudaDevice, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Certified]:
    """Export the model of a task, with random weights, in a precision; verify it on the device."""

    @cache
    def save(task: str) -> Path:
        path = tmp_path_factory.mktemp(task) / "checkpoint"
        made = build_task(task)
        save_checkpoint(path, task, random_model(made.config), made.tokenizer)
        return path

    @cache
    def make(task: str, precision: str) -> Certified:
        checkpoint = save(task)
        package = checkpoint.parent / precision
        form = ("--target", "cuda", "--precision", precision)
        assert run(["export", str(checkpoint), "--out", str(package), *form]) == 0
        assert run(["verify", str(package), str(checkpoint), "--device", "cuda"]) == 0
        return Certified(load_checkpoint(checkpoint), package)

    return make
