"""Nodes of graphs for CUDA, counted in every family: some would cost a capture or a launch.

That onnxruntime places and captures such nodes is seen on the emulated device; this needs none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir
import pytest
import torch
from torch import nn

from engine.package.manifest import PackageFormat, Precision
from exporter import certificate
from exporter.checkpoint import load_checkpoint
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.target import CUDA
from exporter.graphs.torch_export import Graphs
from exporter.models import TransformerConfig, build_model
from tests.emulated.models import MODELS
from tests.exporter.conftest import MakeCheckpoint
from tests.fakes.traces import Trace

PLAIN_NORMS = ("LayerNormalization", "RMSNormalization")
FUSED_NORMS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
CONTROL_FLOW = {"If", "Loop", "Scan"}
WANTS_CUDNN = {"Conv", "ReduceMean", "ReduceMax", "ReduceL2"}


class Left(NamedTuple):
    """Nodes of a graph of two layers that are joined to no other."""

    norms: int  # with no residual before them
    sums: int


# The first norm of a model has no residual, unless positions are added before it: of a decoder each
# row has its own, those of an encoder are one sum for all. Biases are left where they stand before
# ReLU and SiLU, which have no kernel with one; where a residual reads the norm before the product
# too (norm_position "last"); and of keys and values of a source. Queries, keys and values have one.
# Other sums are of positions, of turned heads, of scores, and of the output's bias.
LEFT = {
    "dates": {"encoder.onnx": Left(1, 5), "decoder.onnx": Left(0, 0)},
    "marian": {"encoder.onnx": Left(0, 9), "decoder.onnx": Left(0, 7)},
    "t5": {"encoder.onnx": Left(1, 1), "decoder.onnx": Left(1, 0)},
    "text": {"decoder.onnx": Left(0, 0)},
    "gpt2": {"decoder.onnx": Left(0, 0)},
    "llama": {"decoder.onnx": Left(1, 0)},
    "gemma2": {"decoder.onnx": Left(1, 0)},
    "sentiment": {"model.onnx": Left(0, 3)},
    "sentences": {"model.onnx": Left(0, 5)},
    "sentences-max": {"model.onnx": Left(0, 5)},
    "modernbert": {"model.onnx": Left(1, 4)},
    "tagging": {"model.onnx": Left(1, 2)},
    "digits": {"model.onnx": Left(1, 2)},
}
FAMILIES = ("gpt2", "llama", "marian", "tagging")  # which are traced for the emulated device too
CASES = [
    pytest.param(
        (name, precision),
        id=f"{name}-{precision}",
        marks=() if name in FAMILIES and precision == "fp16" else pytest.mark.long,
    )
    for precision in ("fp16", "bf16", "fp32")
    for name in MODELS
]


class Exported(NamedTuple):
    """A model and its graphs for CUDA."""

    name: str
    precision: Precision
    model: nn.Module
    graphs: Graphs


@pytest.fixture(scope="module", params=CASES)
def exported(request: pytest.FixtureRequest, traced: Trace) -> Exported:
    name, precision = request.param
    torch.manual_seed(0)
    model = build_model(TransformerConfig.of(MODELS[name])).eval()
    return Exported(name, precision, model, traced(model, target=CUDA, precision=precision))


def nodes(graph: ir.Model) -> Iterator[ir.Node]:
    """Yield all nodes, those of functions and of branches too."""
    yield from graph.graph.all_nodes()
    for function in graph.functions.values():
        yield from function.all_nodes()


def kinds(graph: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in nodes(graph))


def count(graph: ir.Model, names: tuple[str, ...]) -> int:
    """Count nodes of the graph itself, not of functions."""
    return sum(node.op_type in names for node in graph.graph)


def test_nothing_branches_and_nothing_wants_cudnn(exported: Exported) -> None:
    for name, graph in exported.graphs.items():
        assert not kinds(graph).keys() & (CONTROL_FLOW | WANTS_CUDNN), name


def test_nothing_asks_for_a_shape(exported: Exported) -> None:
    """It is known on the host alone; decoders have none, readers count their tokens."""
    for name, graph in exported.graphs.items():
        assert kinds(graph)["Shape"] == 0, name


def test_norms_biases_and_residuals_are_fused(exported: Exported) -> None:
    graphs = exported.graphs
    num_norms = sum(
        isinstance(part, nn.LayerNorm | nn.RMSNorm) for part in exported.model.modules()
    )

    left = {
        file: Left(count(graph, PLAIN_NORMS), count(graph, ("Add",)))
        for file, graph in graphs.items()
    }

    assert left == expected(exported)
    assert sum(count(graph, PLAIN_NORMS + FUSED_NORMS) for graph in graphs.values()) == num_norms
    assert all(kinds(graph)["Sigmoid"] == 0 for graph in graphs.values()), "SiLU is one kernel"


def expected(exported: Exported) -> dict[str, Left]:
    """Return what is left; a product takes the bias of the output unless it is half as precise."""
    left = dict(LEFT[exported.name])
    config = exported.model.config
    if config.output_bias and exported.precision != "fp32":
        norms, sums = left["decoder.onnx"]
        left["decoder.onnx"] = Left(norms, sums + 1)
    return left


def test_a_twin_in_float32_has_the_attention_of_the_package(
    make_checkpoint: MakeCheckpoint, traced: Trace, tmp_path: Path
) -> None:
    """Proofs in float32 are proofs of these nodes; a package in float32 has others."""
    checkpoint, numbers = load_checkpoint(make_checkpoint("gpt")), PackageFormat.of("cuda", "fp32")
    write_graphs(traced(checkpoint.model, target=CUDA), tmp_path)

    num_attentions = {}
    for precision in ("fp16", "fp32"):
        form = PackageFormat.of("cuda", precision)
        with certificate._graphs(checkpoint, tmp_path, form, numbers) as directory:
            twin = kinds(ir.load(directory / "decoder.onnx"))
        num_attentions[precision] = twin["GroupQueryAttention"], twin["Attention"]

    assert num_attentions == {"fp16": (1, 0), "fp32": (0, 1)}
