"""Checkpoints whose graphs are traced with a fault."""

from __future__ import annotations

from functools import cache

import pytest
from torch import nn

from exporter.checkpoint import Checkpoint, load_checkpoint
from exporter.graphs import package_graphs
from exporter.graphs.torch_export import Graphs
from tests.exporter.conftest import TinyGraphs
from tests.exporter.prover.surgery import Mutation, Spoil, spoiled

_read = cache(load_checkpoint)


@pytest.fixture
def spoil(tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Let the graphs of a family be traced with a fault; give its checkpoint."""

    def make(family: str, file: str, mutate: Mutation, **options: object) -> Checkpoint:
        def trace(model: nn.Module, **_: object) -> Graphs:
            return spoiled(tiny_graphs(family, **options)[1], file, mutate)

        monkeypatch.setattr(package_graphs, "build_graphs", trace)
        return _read(tiny_graphs(family, **options)[0])

    return make
