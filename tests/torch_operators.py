"""One table of operators for all exports: torch.onnx.export makes another at each, in a second."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry


@pytest.fixture(scope="session", autouse=True)
def operators_made_once() -> Iterator[None]:
    """Give every export a copy of the table of the first; the graphs are the same to the bit."""
    make = functools.cache(ONNXRegistry.from_torchlib)

    def give(opset_version: int) -> ONNXRegistry:
        registry = copy.copy(make(opset_version))
        registry.functions = {name: list(found) for name, found in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(give))
        yield
