"""Exports a checkpoint: graphs, certificate, manifest; a package appears whole or not at all."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from engine.errors import CheckpointError, ConfigError, PackageError
from engine.package import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    NAME_PATTERN,
    CacheDtype,
    Certificate,
    Manifest,
    Weights,
    write_manifest,
)
from engine.package_files import hash_file
from exporter.cases import Progress, sample_prompts
from exporter.certificate import certify
from exporter.checkpoint import CONFIG_NAME, TOKENIZER_NAME, Checkpoint, load_checkpoint
from exporter.contracts import (
    ARCHITECTURES,
    TASKS,
    encoding_contract,
    generation_contract,
    image_contract,
)
from exporter.graphs import Graphs, build_graphs
from exporter.loss import DEFAULT_LIMITS, LossLimits
from exporter.models import GPT, EncoderDecoder
from exporter.quantize import quantize
from exporter.quantize_cache import calibrate, quantize_cache
from exporter.staging import stage
from exporter.toolchain import read_toolchain

Target = Literal["cpu"]


def export_package(
    checkpoint_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    name: str | None = None,
    version: str = "1",
    target: Target = "cpu",
    weights: Weights = "fp32",
    kv_cache: CacheDtype = "fp32",
    limits: LossLimits | None = None,
    text: Path | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Export a checkpoint, prove it equal to the eager model, and write the package.

    The model is served under `name`, else under that of `out_dir`, and its answers tell `version`.
    With another format than fp32 it is not equal: the certificate says what was lost, on `text`
    too, and `limits` (else DEFAULT_LIMITS of the weights) bound it. `progress(done, total)` follows
    the certificate. An existing package at `out_dir` is replaced when the new one is whole. Raises
    ConfigError, CheckpointError, CertificateError or PackageError, and leaves `out_dir` as it was.
    """
    out = Path(os.path.abspath(out_dir))
    name = _name_of(out) if name is None else name
    _check_name("name", name)
    _check_name("version", version)
    _check_replaceable(out)
    checkpoint = load_checkpoint(checkpoint_dir)
    is_lossy = weights != "fp32" or kv_cache != "fp32"
    with stage(out) as staging:
        directory = staging.directory
        write_graphs(_build_graphs(checkpoint, target, weights, kv_cache), directory)
        _copy_files(checkpoint, directory)
        certificate = certify(
            checkpoint,
            directory,
            progress or _no_progress,
            weights=weights,
            kv_cache=kv_cache,
            limits=(limits or DEFAULT_LIMITS[weights]) if is_lossy else None,
            text=text,
        )
        manifest = _describe(
            checkpoint, directory, name, version, target, weights, kv_cache, certificate
        )
        write_manifest(manifest, directory)
        staging.publish()
    return manifest


def write_graphs(graphs: Graphs, directory: Path) -> None:
    """Write each graph and, beside it, its weights in one file."""
    for name, graph in graphs.items():
        ir.save(graph, directory / name, external_data=f"{name}.data")


def _build_graphs(
    checkpoint: Checkpoint, target: Target, weights: Weights, kv_cache: CacheDtype
) -> Graphs:
    graphs = build_graphs(checkpoint.model, body=target)
    for graph in graphs.values():
        quantize(graph, weights)
    if kv_cache == "int8":
        _quantize_cache(checkpoint, graphs)
    return graphs


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


def _describe(
    checkpoint: Checkpoint,
    directory: Path,
    name: str,
    version: str,
    target: Target,
    weights: Weights,
    kv_cache: CacheDtype,
    certificate: Certificate,
) -> Manifest:
    config = checkpoint.config.model
    generation = generation_contract(config, kv_cache)
    files = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST_NAME)
    return Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        version=version,
        architecture=ARCHITECTURES[config.family],
        task=TASKS[config.family],
        target=target,
        layout="slots" if generation else None,
        weights=weights,
        generation=generation,
        encoding=encoding_contract(config),
        image=image_contract(config),
        labels=config.labels,
        files={file: hash_file(directory / file) for file in files},
        toolchain=read_toolchain(),
        certificate=certificate,
    )


def _name_of(out: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", out.name).lstrip("._-")[:64] or "model"


def _check_name(field: str, value: str) -> None:
    if not re.fullmatch(NAME_PATTERN, value):
        raise ConfigError(
            f"{field} {value!r} has to be of 1 to 64 letters, digits, dots, hyphens and "
            "underscores, a letter or digit first; give another"
        )


def copied_files(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the files that a package has from its checkpoint."""
    return [CONFIG_NAME, *([TOKENIZER_NAME] if checkpoint.tokenizer else [])]


def _copy_files(checkpoint: Checkpoint, directory: Path) -> None:
    for name in copied_files(checkpoint):
        (directory / name).write_bytes((checkpoint.path / name).read_bytes())


def _check_replaceable(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not (out / MANIFEST_NAME).is_file()):
        raise PackageError(
            f"{out} exists and is no package, so it is not replaced; "
            "give another directory, or remove it"
        )


def _no_progress(done: int, total: int) -> None:
    pass
