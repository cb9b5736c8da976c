"""One thread: the models are tiny, and threads that compete for a core wait for each other."""

from __future__ import annotations

import pytest
import torch

from exporter.training import trainer


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(trainer, "NUM_THREADS", 1)
