"""Says whether a package was shown on the device that is to serve it, as it is to serve it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import EngineConfig, RequestLimits
from engine.distributions import cuda_version
from engine.errors import PackageError
from engine.package.manifest import DeviceCertificate
from engine.package.package import Package
from engine.wording import listed

if TYPE_CHECKING:
    from engine.cuda.device import CudaDevice

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceUse:
    """The conditions that a device certificate holds under: device, versions and shapes."""

    gpu: str
    driver: str
    onnxruntime: str  # version
    buckets: tuple[int, ...]  # rows that decode calls are padded to, rising; one-pass: none


def settings_as_shown(package: Package, device: CudaDevice, config: EngineConfig) -> EngineConfig:
    """Return the settings for a device, with the rows that the package was shown with.

    Unless other rows are asked for: then, and if nothing was shown on this device, raises
    PackageError with the command to run. A driver other than was shown is only logged.
    """
    found, run = package.manifest.certificate.device, command(package, config)
    if found is None:
        raise PackageError(
            f"{package.path}: nothing shows what it gives on {device.gpu_name}: its certificate is "
            f"that of its graphs only; run `{run}`"
        )
    if not config.max_num_seqs:
        config = config.with_buckets(found.buckets)
    use = use_of(device, buckets_of(package, config))
    if other := list(_differences(found, use)):
        raise PackageError(
            f"{package.path}: its device certificate has {listed(other)}; run `{run}`"
        )
    if found.driver != use.driver:
        _log.warning(
            "%s: its device certificate was made with driver %s, this one is %s",
            package.path,
            found.driver,
            use.driver,
        )
    return config


def is_invariant_as_shown(package: Package, config: EngineConfig) -> bool:
    """Return if a device has shown that rows depend on no other, in calls as an engine makes them.

    Decode calls of an encoder-decoder have room for as many sequences of a source as a request may
    have; the certificate is of the number that nobody has changed.
    """
    found = package.manifest.certificate.device
    if found is None or not found.batch_invariant:
        return False
    contract = package.manifest.generation
    shown, wanted = (limits.most_sequences for limits in (RequestLimits(), config.limits))
    if contract is None or contract.cross_cache is None or shown == wanted:
        return True
    _log.warning(
        "%s: its device certificate is of calls with room for %d sequences of a source, engine."
        "limits want %d; batch_invariant is not offered",
        package.path,
        shown,
        wanted,
    )
    return False


def use_of(device: CudaDevice, buckets: tuple[int, ...]) -> DeviceUse:
    """Return what a certificate made here is of."""
    return DeviceUse(device.gpu_name, device.driver, cuda_version(), buckets)


def buckets_of(package: Package, config: EngineConfig) -> tuple[int, ...]:
    """Return the numbers of rows of decode calls with these settings."""
    if package.manifest.generation is None:
        return ()
    return config.decode_buckets or (config.max_num_seqs,)


def command(package: Package, config: EngineConfig) -> str:
    """Return what to type for a certificate with these settings."""
    generates = package.manifest.generation is not None
    options = verify_options(config) if generates else ["--device", "cuda"]
    return " ".join(["tokenweir verify", str(package.path), "CHECKPOINT", *options])


def verify_options(config: EngineConfig) -> list[str]:
    """Return the options of `tokenweir verify` for what an engine with these settings runs."""
    options = ["--device", "cuda"]
    if config.gpu_memory_utilization != EngineConfig().gpu_memory_utilization:
        options += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    if config.max_num_seqs:
        options += ["--max-num-seqs", str(config.max_num_seqs)]
    if config.decode_buckets:
        options += ["--decode-buckets", ",".join(map(str, config.decode_buckets))]
    return options


def _differences(found: DeviceCertificate, use: DeviceUse) -> Iterator[str]:
    if found.gpu != use.gpu:
        yield f"GPU {found.gpu}, this one is {use.gpu}"
    if found.onnxruntime != use.onnxruntime:
        yield f"onnxruntime {found.onnxruntime}, installed is {use.onnxruntime}"
    if found.buckets != use.buckets:
        one, other = (", ".join(map(str, buckets)) for buckets in (found.buckets, use.buckets))
        yield f"decode calls of {one or 'no'} rows, here they are of {other or 'no'} rows"
