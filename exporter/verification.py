"""Verifies a package against its checkpoint: its files, its contract, and its certificate anew."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Generic, TypeVar

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel

from engine.errors import CertificateError
from engine.package.graph_io import SAMPLING_GRAPHS
from engine.package.manifest import Certificate, DeviceCertificate, Judged, Manifest
from engine.package.package import MANIFEST_NAME, Package, load_package
from engine.wording import listed, shortened
from exporter.certificate import prove
from exporter.checkpoint import Checkpoint
from exporter.compare.scored_text import read_text
from exporter.export import copied_files, opened
from exporter.graphs.contracts import contract_of
from exporter.graphs.target import target_of
from exporter.progress import Progress, no_progress
from exporter.prover.loss import DEFAULT_LIMITS, LossLimits, TextQuality
from exporter.toolchain import read_toolchain

# Measurements differ a little from processor to processor: the cost of rounding by up to twice in
# the median and at the 90th percentile, behind them by chance; the loss of a format by up to half
# at the most, by 5 % in the mean; a count of tokens or labels by 2 % of them.
_TIMES = 2.0
_OF_MAXIMA = 0.5
_OF_MEANS = 0.05
_OF_COUNTS = 0.02
_NOTHING = 1e-7
_CHANCE = frozenset({"p99", "largest", "runs", "floor", "undecided_tokens", "undecided_labels"})
_FIRST_VERSION = Manifest.model_fields["version"].default  # unless somebody chose another
# This machine cannot show the work of newer versions of these: they write graphs, or run them.
_JUDGED = ("tokenweir", "opset", "onnxruntime", "onnxruntime-gpu")
# A package is often exported beside the one and verified on a GPU beside the other.
_OTHER_RUNTIME = {"onnxruntime": "onnxruntime-gpu", "onnxruntime-gpu": "onnxruntime"}
_OF_TEXT = frozenset(f"loss.{field.name}" for field in fields(TextQuality))
_COUNTS = frozenset(
    {"tokens_compared", "tokens_equal", "labels_turned", "pairs_turned", "neighbours_kept"}
)

AnyCertificate = Certificate | DeviceCertificate
Proven = TypeVar("Proven", Certificate, DeviceCertificate)


@dataclass(frozen=True)
class Verification(Generic[Proven]):
    """A package that is what its manifest says, and what was found about it besides."""

    package: Package
    matches: str  # its checkpoint, and the GPU if it was run there
    certificate: Proven  # the new one; that of the package agrees with it
    shown: str  # besides the cases
    notes: tuple[str, ...]

    def summary(self) -> str:
        """Say in one line what was found."""
        manifest = self.package.manifest
        found = (
            f"{self.package.path.name}: {manifest.name} {manifest.version} matches {self.matches}: "
            f"{len(manifest.files)} files intact, {self.certificate.cases:,} cases compared"
            f"{self.shown}"
        )
        return "; ".join([found, *self.notes])


def verify_package(
    package_dir: str | os.PathLike[str],
    checkpoint_dir: str | os.PathLike[str] | Checkpoint,
    *,
    text: Path | None = None,
    progress: Progress = no_progress,
) -> Verification[Certificate]:
    """Compare a package with a checkpoint again, and its certificate with what is found.

    Name, version and the limits of a format that rounds are what a person chose: nothing tells
    whether they were edited, so they are noted where `export` does not give them by itself. A
    toolchain other than that of this machine is noted as a claim; a newer release, opset or
    onnxruntime is refused before anything is compared. Raises PackageError if the package is
    damaged, and CertificateError if it is not this checkpoint's, or has a file that is not, or if
    its certificate says what is not found.
    """
    package, checkpoint = load_both(package_dir, checkpoint_dir)
    manifest, stored = package.manifest, package.manifest.certificate
    found = prove(
        checkpoint,
        package.path,
        manifest.format,
        proof=stored.proof,
        limits=LossLimits.of(stored.loss) if stored.loss else None,
        text=read_text(text, checkpoint) if text else None,
        progress=progress,
    )
    package.check_unchanged()
    notes = tuple(_judge(package, found))
    return Verification(package, str(checkpoint.path), found, ", certificate reproduced", notes)


def load_both(
    package_dir: str | os.PathLike[str], checkpoint_dir: str | os.PathLike[str] | Checkpoint
) -> tuple[Package, Checkpoint]:
    """Load a package and the checkpoint that it is of, before they are compared.

    Raises PackageError, and CertificateError where the contract or a file is not the checkpoint's
    or a newer release made the package.
    """
    package, checkpoint = load_package(package_dir), opened(checkpoint_dir)
    _check_is_of(package, checkpoint)
    _check_toolchain(package, read_toolchain())
    return package, checkpoint


def _check_is_of(package: Package, checkpoint: Checkpoint) -> None:
    for name in copied_files(checkpoint):
        if package.file(name).read_bytes() != (checkpoint.path / name).read_bytes():
            raise CertificateError(
                f"{package.path / name} is not that of {checkpoint.path}; "
                "give the checkpoint that the package was exported from, or export it again"
            )
    # The engine might read a file that no export of the checkpoint has.
    manifest, graphs = package.manifest, package.manifest.graphs
    exported = {*copied_files(checkpoint), *graphs, *(f"{name}.data" for name in graphs)}
    if manifest.generation and target_of(manifest.format).has_sampling_graphs:
        exported.update(SAMPLING_GRAPHS)
    if others := sorted(manifest.files.keys() - exported):
        raise CertificateError(
            f"{package.path / others[0]} is not of {checkpoint.path}, which exports to no such "
            "file; give the checkpoint that the package was exported from, or export it again"
        )
    contract = contract_of(checkpoint.config.model, manifest.format)
    expected = {**vars(contract), "defaults": checkpoint.config.generation}
    for field, wanted in expected.items():
        found = getattr(manifest, field)
        if found != wanted:
            raise CertificateError(
                f"{package.path / MANIFEST_NAME}: {field} is {shortened(found)}, "
                f"the checkpoint's is {shortened(wanted)}; export it again"
            )


def _check_toolchain(package: Package, here: Mapping[str, str]) -> None:
    for name in _JUDGED:
        stored = package.manifest.toolchain.get(name)
        installed = here.get(name, here.get(_OTHER_RUNTIME.get(name, name)))
        if stored is not None and installed and not _is_at_most(stored, installed):
            raise CertificateError(
                f"{package.path / MANIFEST_NAME}: its toolchain has {name} {shortened(stored)}, "
                f"which {installed} of this machine cannot show; verify it where that is "
                "installed, or export it again here"
            )


def _is_at_most(version: str, limit: str) -> bool:
    try:
        return Version(version) <= Version(limit)
    except InvalidVersion:
        return False


def _judge(package: Package, found: Certificate) -> Iterator[str]:
    """Yield what is worth a note; CertificateError where the stored certificate is not found."""
    manifest, here = package.manifest, read_toolchain()
    device = manifest.certificate.device
    wrong = list(differences(manifest.certificate.model_copy(update={"device": None}), found))
    if wrong:
        raise CertificateError(
            f"{package.path / MANIFEST_NAME}: its certificate is not what is found: "
            f"{listed(wrong)}; {_way_out(manifest.toolchain, here)}"
        )
    loss = manifest.certificate.loss
    if loss and loss.has_text and found.loss and not found.loss.has_text:
        yield "nothing of --text was measured again, for which it is to be given"
    if device:
        yield (
            f"not shown here, but claimed: what it gives on {device.gpu} with driver "
            f"{device.driver} and onnxruntime {device.onnxruntime}, for which --device "
            f"{manifest.target} is to be given there"
        )
    yield from _chosen(package)
    yield _made_with(manifest.toolchain, here)


def _way_out(stored: Mapping[str, str], here: Mapping[str, str]) -> str:
    release = stored.get("tokenweir", "none")
    installed = here.get("tokenweir", release)  # none is told among all else that differs
    if release != installed:
        return (
            f"it was edited, or tokenweir {shortened(release)} tried other cases than "
            f"{installed} does; export it again with this release, or verify it with "
            "that one"
        )
    return (
        f"it was edited, or another machine found it ({_made_with(stored, here)}); "
        "export the model again"
    )


def _chosen(package: Package) -> Iterator[str]:
    """Yield a note of what `export` does not give unless it is asked to."""
    manifest = package.manifest
    chosen = [f"the name {manifest.name}"] if manifest.name != package.path.name else []
    chosen += [f"the version {manifest.version}"] if manifest.version != _FIRST_VERSION else []
    if loss := manifest.certificate.loss:
        usual = asdict(DEFAULT_LIMITS[manifest.weights])
        limits = asdict(LossLimits.of(loss))
        chosen += [f"{name} {limit:g}" for name, limit in limits.items() if limit != usual[name]]
    if chosen:
        yield f"not verified: {listed(chosen)}, which a person chose"


def _made_with(stored: Mapping[str, str], here: Mapping[str, str]) -> str:
    names = dict.fromkeys((*stored, *here))
    changed = [
        f"{shortened(name)} {shortened(stored.get(name, 'none'))} (here {here.get(name, 'none')})"
        for name in names
        if stored.get(name) != here.get(name)
    ]
    if not changed:
        return "made with the same toolchain"
    return f"claimed, not verified: made with {listed(changed)}"


def differences(stored: AnyCertificate, found: AnyCertificate) -> Iterator[str]:
    """Yield each field that does not agree, and both its values."""
    was, now = _flat(stored), _flat(found)
    has_text = found.loss is not None and found.loss.has_text
    for name in dict.fromkeys((*was, *now)):
        one, other = was.get(name), now.get(name)
        is_measured = has_text or name not in _OF_TEXT
        if is_measured and not _agrees(name, one, other, is_lossy=found.loss is not None):
            yield f"{shortened(name)} is {shortened(one)}, found {shortened(other)}"


def _flat(value: object, name: str = "") -> dict[str, object]:
    """Return the fields of a certificate by name; what was judged by its play."""
    if isinstance(value, BaseModel):
        value = {field: getattr(value, field) for field in type(value).model_fields}
    if isinstance(value, tuple) and value and isinstance(value[0], Judged):
        value = {f"{one.play}, {one.what}": one for one in value}
    if not isinstance(value, dict):
        return {name: value}
    parts = (_flat(part, f"{name}.{key}" if name else key) for key, part in value.items())
    return {name: value for part in parts for name, value in part.items()}


def _agrees(name: str, one: object, other: object, *, is_lossy: bool) -> bool:
    """Say whether two values of a field may be of one package."""
    field = name.rpartition(".")[2]
    if field in _CHANCE:
        return True
    if isinstance(one, float) and isinstance(other, float):
        if field in {"median", "p90"}:
            low, high = sorted((one, other))
            return high <= _TIMES * low + _NOTHING
        if name.startswith("answers.") and not is_lossy:
            return True  # the largest of what rounding costs
        allowed = _OF_MAXIMA if field.startswith("max_") else _OF_MEANS
        return math.isclose(one, other, rel_tol=allowed, abs_tol=_NOTHING)
    if field in _COUNTS and isinstance(one, int) and isinstance(other, int):
        return math.isclose(one, other, rel_tol=_OF_COUNTS, abs_tol=1)
    return one == other
