"""Tiny models and few examples: threads that compete for a core wait for each other."""

from __future__ import annotations

import pytest
import torch

from exporter.tasks import made
from exporter.training import trainer


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(trainer, "NUM_THREADS", 1)


@pytest.fixture
def few_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "NUM_LEARNED", 1200)
    monkeypatch.setattr(made, "NUM_JUDGED", 200)
