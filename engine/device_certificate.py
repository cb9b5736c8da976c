"""Says whether a package was shown on the device that is to serve it, as it is to serve it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import PackageError
from engine.package import DeviceCertificate, Package
from engine.wording import listed

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceUse:
    """What a device certificate is of: a device, what computes on it, and in which shapes."""

    gpu: str
    driver: str
    onnxruntime: str  # version of what computes
    buckets: tuple[int, ...]  # rows that decode calls are padded to, rising; one-pass: none


def check_shown(package: Package, use: DeviceUse) -> DeviceCertificate:
    """Return the device certificate of a package; a driver other than its own is only logged.

    Raises PackageError, with the command to run, if there is none or it is of another use.
    """
    found = package.manifest.certificate.device
    if found is None:
        raise PackageError(
            f"{package.path}: nothing shows what it gives on {use.gpu}: its certificate is that "
            f"of its graphs only; run `{command(package, use)}`"
        )
    other = list(_differences(found, use))
    if other:
        raise PackageError(
            f"{package.path}: its device certificate has {listed(other)}; "
            f"run `{command(package, use)}`"
        )
    if found.driver != use.driver:
        _log.warning(
            "%s: its device certificate was made with driver %s, this one is %s",
            package.path,
            found.driver,
            use.driver,
        )
    return found


def device_name(package: Package, config: EngineConfig) -> str:
    """Return where a package runs, once `check_shown` let it pass: "cpu", or the GPU's name."""
    found = package.manifest.certificate.device
    device = config.device_for(package.manifest.target)
    return found.gpu if found and device == "cuda" else device


def command(package: Package, use: DeviceUse) -> str:
    """Return what to type for a certificate of this use."""
    words = ["tokenweir verify", str(package.path), "CHECKPOINT --device cuda"]
    if use.buckets and use.buckets[-1] != EngineConfig().max_num_seqs:
        words.append(f"--max-num-seqs {use.buckets[-1]}")
    if len(use.buckets) > 1:
        words.append(f"--decode-buckets {','.join(map(str, use.buckets))}")
    return " ".join(words)


def _differences(found: DeviceCertificate, use: DeviceUse) -> Iterator[str]:
    if found.gpu != use.gpu:
        yield f"GPU {found.gpu}, this one is {use.gpu}"
    if found.onnxruntime != use.onnxruntime:
        yield f"onnxruntime {found.onnxruntime}, installed is {use.onnxruntime}"
    if found.buckets != use.buckets:
        one, other = (", ".join(map(str, buckets)) for buckets in (found.buckets, use.buckets))
        yield f"decode calls of {one or 'no'} rows, here they are of {other or 'no'} rows"
