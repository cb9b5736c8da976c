"""Graphs are traced once for all tests, in whichever process: that takes seconds."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

from engine.package.manifest import Precision
from exporter.graphs import package_graphs
from exporter.graphs.target import CPU, TARGETS, Target
from exporter.graphs.torch_export import Graphs, build_graphs
from exporter.models.bert import Bert
from exporter.models.transformer import GPT, EncoderDecoder
from exporter.models.vit import ViT
from exporter.operators.bodies import attach_bodies
from exporter.operators.domain import Functions

Trace = Callable[..., Graphs]

_OURS = (Bert, EncoderDecoder, GPT, ViT)


@pytest.fixture(scope="session", autouse=True)
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    """Build graphs, or give those that an equal model of ours had before; exports do so as well.

    The table of operators, which torch.onnx.export makes at each call in a second, is made once,
    and no memory is given back behind an export: that takes a fifth of a second, for small models.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "traces"
    folder.mkdir(exist_ok=True)
    make = functools.cache(ONNXRegistry.from_torchlib)

    def operators(opset_version: int) -> ONNXRegistry:
        registry = copy.copy(make(opset_version))
        registry.functions = {name: list(found) for name, found in registry.functions.items()}
        return registry

    def graphs_of(
        model: nn.Module,
        *,
        target: Target = CPU,
        precision: Precision = "fp32",
        functions: Functions | None = None,
    ) -> Graphs:
        options: Any = {"target": target, "precision": precision}
        if type(model) not in _OURS or target not in TARGETS.values():
            return build_graphs(model, **options, functions=functions)
        place = folder / _key(model, f"{target.name} {precision}")
        if not place.exists():
            staging = Path(f"{place}.{os.getpid()}")
            staging.mkdir()
            for name, graph in build_graphs(model, **options).items():
                ir.save(graph, staging / name)
            with suppress(OSError):  # another process was quicker
                staging.rename(place)
        graphs = {path.name: ir.load(path) for path in sorted(place.iterdir(), reverse=True)}
        for graph in graphs.values():  # as the last step of a trace does
            attach_bodies(graph, functions or target.functions[precision])
        return graphs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(operators))
        patch.setattr(package_graphs, "build_graphs", graphs_of)
        patch.setattr(package_graphs, "gc", SimpleNamespace(collect=lambda: 0))
        yield graphs_of


@pytest.fixture
def traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test that changes how models are traced have graphs of its own."""
    monkeypatch.setattr(package_graphs, "build_graphs", build_graphs)


def _key(model: nn.Module, how: str) -> str:
    about = hashlib.sha256(f"{type(model)} {model.config!r} {how}".encode())
    for name, tensor in model.state_dict().items():
        about.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        about.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return about.hexdigest()
