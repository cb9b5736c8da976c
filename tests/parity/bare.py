"""Graphs of random models with neither certificate nor manifest, for what the runner does."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine.package.manifest import CacheDtype, GenerationContract, PackageFormat, Weights
from engine.slots.runner import SlotModelRunner
from exporter.graphs.cache_int8 import calibrate, quantize_cache
from exporter.graphs.contracts import generation_contract
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.torch_export import build_graphs
from exporter.graphs.weights import quantize
from exporter.models import TransformerConfig
from tests.parity.conftest import random_model


class Bare(NamedTuple):
    """A model's graphs on disk."""

    contract: GenerationContract
    path: Path

    def load(self, *, num_slots: int, num_threads: int) -> SlotModelRunner:
        """Load the graphs as an engine does."""
        encoder = self.path / "encoder.onnx" if self.contract.cross_cache else None
        return SlotModelRunner.load(
            self.contract,
            self.path / "decoder.onnx",
            encoder,
            num_slots=num_slots,
            num_threads=num_threads,
        )


def write_bare(
    config: TransformerConfig,
    path: Path,
    *,
    weights: Weights = "fp32",
    kv_cache: CacheDtype = "fp32",
) -> Bare:
    """Write the graphs of a random model."""
    model = random_model(config)
    form = PackageFormat(weights=weights, kv_cache=kv_cache)
    contract = generation_contract(config, form)
    assert contract is not None
    graphs = build_graphs(model)
    for graph in graphs.values():
        quantize(graph, form)
    if kv_cache == "int8":
        quantize_cache(graphs["decoder.onnx"], calibrate(model, contract, []))
    path.mkdir()
    write_graphs(graphs, path)
    return Bare(contract, path)
