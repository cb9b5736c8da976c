"""The graphs of a package: a checkpoint's model, with the numbers of a format, in files."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer

from engine.errors import CheckpointError, ConfigError
from engine.machine import give_back_freed_memory
from engine.package.graph_io import SAMPLING_GRAPHS
from engine.package.manifest import PackageFormat
from exporter.checkpoint import Checkpoint
from exporter.graphs.cache_int8 import calibrate, quantize_cache
from exporter.graphs.contracts import generation_contract
from exporter.graphs.input_scales import Passage, fixed_scales
from exporter.graphs.sampling_graphs import sampling_graphs
from exporter.graphs.target import target_of
from exporter.graphs.torch_export import Graphs, build_graphs, traced
from exporter.graphs.weights import quantize
from exporter.models.protocol import generator
from exporter.operators.domain import OPSET, Functions
from exporter.samples import encode_samples


def check_format(form: PackageFormat, checkpoint: Checkpoint) -> None:
    """Raise ConfigError, naming everything that does not go together, or with this model."""
    target = target_of(form)
    problems = form.problems
    config = checkpoint.config.model
    if form.kv_cache == "int8":
        kernel = (
            f"kv_cache: the target {target.name} reads int8 itself, and makes no float16 of all "
            "rows in every step, where"
        )
        group, groups = config.num_heads // config.kv_heads, target.int8_cache_groups
        if groups is not None and group not in groups:
            sharing = ", ".join(map(str, groups))
            problems.append(f"{kernel} {sharing} query heads share a key head, here {group}")
        width, widths = config.cache_head_dim, target.int8_cache_widths
        if widths is not None and width not in widths:
            problems.append(f"{kernel} heads are {', '.join(map(str, widths))} wide, here {width}")
        if target.int8_cache_unbounded and config.attention.softcap is not None:
            problems.append(f"{kernel} scores have no bound (attention.softcap)")
    if form.is_fitted and not config.num_decoder_layers:
        problems.append(f"weights: {form.weights} is for models that generate; int8 is for all")
    if problems:
        raise ConfigError(f"{checkpoint.path}: {'; '.join(problems)}; choose another format")


def build_package_graphs(
    checkpoint: Checkpoint,
    form: PackageFormat,
    functions: Functions | None = None,
    text: Sequence[Passage] = (),
    *,
    draws: bool = True,
) -> Graphs:
    """Export a model with the numbers of a format; CheckpointError if it has no cache to round.

    `functions` compute the operators; without them, those of the format do. A format that is made
    for a text needs one. Without `draws` tokens are drawn by no graph.
    """
    target = target_of(form)
    functions = functions or target.functions[form.precision]
    with traced(checkpoint.config.task):
        graphs = build_graphs(
            checkpoint.model, target=target, precision=form.precision, functions=functions
        )
    contract = generation_contract(checkpoint.config.model)
    scales = fixed_scales(graphs, contract, text) if contract and form.is_fitted else {}
    for name, graph in graphs.items():
        quantize(graph, form, scales.get(name))
    if form.kv_cache == "int8":
        if contract is None:
            raise CheckpointError(
                f"{checkpoint.path}: a model that does not generate has no cache; leave out "
                "--kv-cache"
            )
        limit = contract.max_prompt_len
        samples = encode_samples(checkpoint.samples, checkpoint.tokenizer, limit)
        cache_scales = calibrate(generator(checkpoint.model), contract, samples)
        quantize_cache(graphs["decoder.onnx"], cache_scales, functions)
    if draws and target.has_sampling_graphs and contract is not None:
        return {**graphs, **sampling_graphs(contract.vocab_size)}
    return graphs


def write_package_graphs(
    checkpoint: Checkpoint, form: PackageFormat, directory: Path, **options: Any
) -> None:
    """Write what `build_package_graphs` gives with these options, and give its memory back."""
    write_graphs(build_package_graphs(checkpoint, form, **options), directory)
    # The rules of torch's exporter keep the last graph that they were tried on, with its weights.
    # One is tried on pairs of slices alone.
    values = [ir.Value(name=name) for name in "xyz"]
    nodes = [ir.node("Slice", values) for _ in range(2)]
    onnxscript.optimizer.optimize(
        ir.Model(ir.Graph((), (), nodes=nodes, opset_imports={"": OPSET}), ir_version=10)
    )
    gc.collect()
    give_back_freed_memory()


def write_graphs(graphs: Graphs, directory: Path) -> None:
    """Write each graph and, beside it, its weights in one file; draws have none."""
    for name, graph in graphs.items():
        weights = None if name in SAMPLING_GRAPHS else f"{name}.data"
        ir.save(graph, directory / name, external_data=weights)
