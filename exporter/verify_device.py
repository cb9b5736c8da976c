"""Verifies a package on a GPU, and writes what was found there into its manifest."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.cuda.certificate import DeviceUse, use_of
from engine.cuda.device import open_device
from engine.errors import CertificateError
from engine.package.manifest import DeviceCertificate
from engine.package.package import MANIFEST_NAME, Package, write_manifest
from engine.wording import listed
from exporter.device_certificate import prove_on_device
from exporter.prover.digest import find_elsewhere
from exporter.prover.execution import OnDevice
from exporter.prover.progress import Progress, no_progress
from exporter.verification import differences, load_both


@dataclass(frozen=True)
class DeviceVerification:
    """A package that gives on a GPU what its checkpoint gives."""

    package: Package
    checkpoint: Path
    certificate: DeviceCertificate
    was_there: bool  # the package had it; else it has it now

    def summary(self) -> str:
        """Say in one line what was found."""
        manifest, found = self.package.manifest, self.certificate
        buckets = ", ".join(map(str, found.buckets))
        calls = f" in decode calls of {buckets} rows" if buckets else ""
        made = "reproduced" if self.was_there else "written"
        return (
            f"{self.package.path.name}: {manifest.name} {manifest.version} matches "
            f"{self.checkpoint} on {found.gpu}: {len(manifest.files)} files intact, "
            f"{found.cases:,} cases compared{calls}, outputs reproduced by another process; device "
            f"certificate {made}"
        )


def verify_on_device(
    package_dir: str | os.PathLike[str],
    checkpoint_dir: str | os.PathLike[str],
    config: EngineConfig,
    *,
    progress: Progress = no_progress,
) -> DeviceVerification:
    """Compare a package with a checkpoint on the GPU, as a worker with `config` runs it there.

    The findings are written into the manifest, which is replaced whole, or stays as it was. A
    certificate that it has of the same device and use must agree with them. Raises ConfigError
    if the package was not made for a GPU, DeviceError if there is none, PackageError if the package
    is damaged, and CertificateError if it is not this checkpoint's or does not give what that does.
    """
    package, checkpoint = load_both(package_dir, checkpoint_dir)
    config.device_for(package.manifest.target)
    device = open_device()
    # First, for two processes need not hold a large model at once. It finds how many rows fit.
    elsewhere = find_elsewhere(package, OnDevice(package, config, device))
    execution = OnDevice(package, config.with_buckets(elsewhere.buckets), device)
    use = use_of(device, elsewhere.buckets)
    found = prove_on_device(package, checkpoint, execution, use, elsewhere.digest, progress)
    package.check_unchanged()
    was_there = _is_found_again(package, found, use)
    if not was_there:
        manifest = package.manifest
        certificate = manifest.certificate.model_copy(update={"device": found})
        write_manifest(manifest.model_copy(update={"certificate": certificate}), package.path)
    return DeviceVerification(package, checkpoint.path, found, was_there)


def _is_found_again(package: Package, found: DeviceCertificate, use: DeviceUse) -> bool:
    """Return whether the package has what is found; CertificateError if it claims something else.

    A certificate of another use claims nothing about this one.
    """
    stored = package.manifest.certificate.device
    if stored is None:
        return False
    if DeviceUse(stored.gpu, stored.driver, stored.onnxruntime, stored.buckets) != use:
        return False
    if wrong := list(differences(stored, found)):
        raise CertificateError(
            f"{package.path / MANIFEST_NAME}: its device certificate is not what is found: "
            f"{listed(wrong)}; it was edited, or libraries of CUDA are others than they were; "
            "export the model again and verify it here"
        )
    return True
