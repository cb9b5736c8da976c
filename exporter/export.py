"""Exports a checkpoint: graphs, certificate, manifest; a package appears whole or not at all."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.errors import CertificateError, ConfigError, PackageError
from engine.machine import free_large_blocks_at_once, free_memory
from engine.package.files import hash_file
from engine.package.manifest import (
    FORMAT_VERSION,
    NAME_PATTERN,
    CacheDtype,
    Certificate,
    Manifest,
    PackageFormat,
    Precision,
    Proof,
    Target,
    Weights,
)
from engine.package.package import MANIFEST_NAME, write_manifest
from exporter.certificate import UnroundedError, expected_seconds, prove
from exporter.checkpoint import (
    CONFIG_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    Checkpoint,
    load_checkpoint,
)
from exporter.compare.scored_text import MAX_TOKENS, ScoredText, read_text
from exporter.files import stage
from exporter.graphs.contracts import contract_of
from exporter.graphs.input_scales import Passage
from exporter.graphs.package_graphs import check_format, write_package_graphs
from exporter.graphs.target import DEFAULT, target_of
from exporter.progress import Progress, no_progress
from exporter.prover.loss import DEFAULT_LIMITS, LossLimits
from exporter.toolchain import read_toolchain

MIN_TOKENS = 256  # that scales are fixed on

_log = logging.getLogger(__name__)


def export_package(
    checkpoint_dir: str | os.PathLike[str] | Checkpoint,
    out_dir: str | os.PathLike[str],
    *,
    name: str | None = None,
    version: str = "1",
    target: Target = DEFAULT.name,
    precision: Precision = "fp32",
    weights: Weights | None = None,
    kv_cache: CacheDtype | None = None,
    limits: LossLimits | None = None,
    text: Path | None = None,
    proof: Proof = "standard",
    progress: Progress = no_progress,
) -> Manifest:
    """Export a checkpoint, prove it equal to the eager model, and write the package.

    The model is served under `name`, else under that of `out_dir`, and its answers tell `version`.
    Graphs in half precision are as near to the eager model as it is itself in that type. If weights
    or cache are rounded, the certificate says what was lost, on `text` too, and `limits` (else
    DEFAULT_LIMITS of the weights) bound it. int8-fixed takes its scales from the part of `text`
    that nothing is measured on. If `kv_cache` is None, int8 weights for a CPU have an int8 cache
    beside them if the limits let them. `progress(done, total)` follows the certificate.
    A package at `out_dir` is replaced when the new one is whole. Raises ConfigError,
    CheckpointError, CertificateError or PackageError, and leaves `out_dir` as it was.
    """
    out = Path(os.path.abspath(out_dir))
    name = _name_of(out) if name is None else name
    _check_names(name=name, version=version)
    _check_replaceable(out)
    form = PackageFormat.of(target, precision, weights, kv_cache)
    if not isinstance(checkpoint_dir, Checkpoint):
        _check_memory(Path(checkpoint_dir))
    checkpoint = opened(checkpoint_dir)
    check_format(form, checkpoint)
    scored = None if text is None else read_text(text, checkpoint)
    behind = _passages(form, scored)

    def export(form: PackageFormat, *, is_proven_unrounded: bool = False) -> Manifest:
        most = (limits or DEFAULT_LIMITS[form.weights]) if form.is_lossy else None
        progress(0, 0, "tracing graphs", expected_seconds(checkpoint, form, proof))
        with stage(out) as staging:
            directory = staging.directory
            for file in copied_files(checkpoint):
                (directory / file).write_bytes((checkpoint.path / file).read_bytes())
            write_package_graphs(checkpoint, form, directory, text=behind)
            found = prove(
                checkpoint,
                directory,
                form,
                proof=proof,
                limits=most,
                text=scored,
                is_proven_unrounded=is_proven_unrounded,
                progress=progress,
            )
            manifest = _write_manifest(name, version, checkpoint, form, directory, found)
            staging.publish()
        if found.is_near_overflow:
            _log.warning(
                "%s computes numbers up to %s; of 65,504 float16 has none above, so that another "
                "text may end without an answer: bf16 and fp32 have room",
                name,
                f"{found.largest_float16:,.0f}",
            )
        return manifest

    if kv_cache is None and _is_faster_with_int8_cache(form, checkpoint):
        try:
            return export(replace(form, kv_cache="int8"))
        except UnroundedError:  # another cache would change nothing
            raise
        except CertificateError as error:
            _log.warning("%s keeps its cache in %s: in int8, %s", name, precision, error)
            return export(form, is_proven_unrounded=form.is_lossy)
    return export(form)


def _check_memory(checkpoint: Path) -> None:
    """Refuse a model that has no room in memory beside its graphs and one weight in float64."""
    weights = checkpoint / WEIGHTS_NAME
    if not weights.is_file():
        return  # which is told when it is read
    needed = 3 * weights.stat().st_size + 2**30  # graphs, model, and what is computed with
    if needed > (free := free_memory()):
        raise ConfigError(
            f"{checkpoint}: an export needs about {needed / 2**30:.1f} GiB of memory and "
            f"{free / 2**30:.1f} are free, {(needed - free) / 2**30:.1f} are missing; end what "
            "takes memory, or export on another machine and copy the package"
        )


def _is_faster_with_int8_cache(form: PackageFormat, checkpoint: Checkpoint) -> bool:
    """Say whether weights are so small that a step waits for keys and values; see cache_int8."""
    generates = contract_of(checkpoint.config.model, form).generation is not None
    is_small = form.weights in ("int8", "int8-fixed")
    return generates and target_of(form).has_faster_int8_cache and is_small


def _passages(form: PackageFormat, text: ScoredText | None) -> Sequence[Passage]:
    """Return what scales are fixed on, if any are; ConfigError if it is too little."""
    if not form.is_fitted:
        return ()
    if text is None:
        raise ConfigError(
            f"weights: {form.weights} fixes scales on a text; give --text, or take --weights int8"
        )
    if text.num_behind < MIN_TOKENS:
        raise ConfigError(
            f"weights: {form.weights} fixes scales on what stands behind the {MAX_TOKENS:,} tokens "
            f"that the loss is measured on, {MIN_TOKENS} tokens or more that the model could write,"
            f" here {text.num_behind}; give a longer --text, or take --weights int8"
        )
    return text.behind


def opened(checkpoint: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    """Return a checkpoint to be compared with its graphs, read if it is a path.

    From here on the process gives large blocks that it frees back to the system.
    """
    free_large_blocks_at_once()
    return checkpoint if isinstance(checkpoint, Checkpoint) else load_checkpoint(checkpoint)


def _check_names(**given: str) -> None:
    """Raise ConfigError for a name or version that a manifest does not have."""
    for field, value in given.items():
        if not re.fullmatch(NAME_PATTERN, value):
            raise ConfigError(
                f"{field} {value!r} has to be of 1 to 64 letters, digits, dots, hyphens and "
                "underscores, a letter or digit first; give another"
            )


def _write_manifest(
    name: str,
    version: str,
    checkpoint: Checkpoint,
    form: PackageFormat,
    directory: Path,
    certificate: Certificate,
) -> Manifest:
    contract = contract_of(checkpoint.config.model, form)
    files = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST_NAME)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        version=version,
        **vars(contract),
        target=form.target,
        precision=form.precision,
        layout="slots" if contract.generation else None,
        weights=form.weights,
        defaults=checkpoint.config.generation,
        files={file: hash_file(directory / file) for file in files},
        toolchain=read_toolchain(),
        certificate=certificate,
    )
    write_manifest(manifest, directory)
    return manifest


def _name_of(out: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", out.name).lstrip("._-")[:64] or "model"


def copied_files(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the files that a package has from its checkpoint."""
    tokenizer = [TOKENIZER_NAME] if checkpoint.tokenizer else []
    return [CONFIG_NAME, *tokenizer, *checkpoint.text.content()]


def _check_replaceable(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not (out / MANIFEST_NAME).is_file()):
        raise PackageError(
            f"{out} exists and is not a package, so it is not replaced; "
            "give another directory, or remove it"
        )
