"""The graphs of a package: a checkpoint's model, with the numbers of a format, in files."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import torch

from engine.errors import CheckpointError, ConfigError
from engine.package.manifest import PackageFormat, Precision
from exporter.certificate.cases import sample_prompts
from exporter.checkpoint import Checkpoint
from exporter.graphs.cache_int8 import calibrate, quantize_cache
from exporter.graphs.contracts import generation_contract
from exporter.graphs.torch_export import Graphs, build_graphs
from exporter.graphs.weights import quantize
from exporter.models import GPT, EncoderDecoder
from exporter.operator_bodies import Body

_DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_CUDA_CACHE_GROUPS = (4, 8, 16, 32)  # query heads a key head for which CUDA reads an int8 cache


def check_format(form: PackageFormat, checkpoint: Checkpoint) -> None:
    """Raise ConfigError, naming everything that does not go together, or with this model."""
    problems = form.problems
    config = checkpoint.config.model
    group = config.num_heads // config.kv_heads
    if form.target == "cuda" and form.kv_cache == "int8" and group not in _CUDA_CACHE_GROUPS:
        problems.append(
            f"kv_cache: int8 has a fast kernel for the target cuda where "
            f"{', '.join(map(str, _CUDA_CACHE_GROUPS))} query heads share a key head, here {group}"
        )
    if problems:
        raise ConfigError(f"{checkpoint.path}: {'; '.join(problems)}; choose another format")


def body_of(form: PackageFormat) -> Body:
    """Return what computes attention in graphs of a format."""
    if form.target == "cpu":
        return "cpu"
    return "cuda-fp32" if form.precision == "fp32" else "cuda"


def build_package_graphs(checkpoint: Checkpoint, form: PackageFormat, body: Body) -> Graphs:
    """Export a model with the numbers of a format; CheckpointError if it has no cache to round."""
    graphs = build_graphs(checkpoint.model, body=body, dtype=_DTYPES[form.precision])
    for graph in graphs.values():
        quantize(graph, form)
    if form.kv_cache == "int8":
        _quantize_cache(checkpoint, graphs)
    return graphs


def write_graphs(graphs: Graphs, directory: Path) -> None:
    """Write each graph and, beside it, its weights in one file."""
    for name, graph in graphs.items():
        ir.save(graph, directory / name, external_data=f"{name}.data")


def _quantize_cache(checkpoint: Checkpoint, graphs: Graphs) -> None:
    model, contract = checkpoint.model, generation_contract(checkpoint.config.model)
    if contract is None:
        raise CheckpointError(
            f"{checkpoint.path}: a model that does not generate has no cache; leave out --kv-cache"
        )
    assert isinstance(model, GPT | EncoderDecoder), "the families that generate"
    limit = (contract.cross_cache or contract.cache).max_len
    samples = sample_prompts(checkpoint.config.task, checkpoint.tokenizer, limit)
    quantize_cache(graphs["decoder.onnx"], calibrate(model, contract, samples))
