"""Compares a package with its eager model on a device: the second stage of its certificate.

The cases are those of the graphs' own stage, by the kernels that serve: every decode call has the
rows of a bucket, and a row that is alone is the only one of them that counts. Float32 is held to
the tolerance of all packages, half precision to the bound of exporter/half_comparison.py, what is
rounded further to the limits that it was exported with.
"""

from __future__ import annotations

import copy

from torch import nn

from engine.device_certificate import DeviceUse
from engine.errors import CertificateError
from engine.package import DeviceCertificate, Package
from engine.wording import shortened
from exporter.cases import Progress
from exporter.certificate import compare_all
from exporter.certify_half import half_of
from exporter.checkpoint import Checkpoint
from exporter.comparison import Comparison, LossyComparison
from exporter.device_digest import digest_elsewhere, digest_of
from exporter.execution import Execution
from exporter.half_comparison import Half, HalfComparison
from exporter.loss import check_loss, limits_of


def certify_device(
    package: Package,
    checkpoint: Checkpoint,
    execution: Execution,
    use: DeviceUse,
    progress: Progress,
) -> DeviceCertificate:
    """Compare all cases where and as `execution` says, and find the outputs in another process.

    `use` names it in the certificate. Raises CertificateError at the first fault.
    """
    manifest = package.manifest
    model = copy.deepcopy(checkpoint.model).eval().double()
    found = _Found(package, model)
    # First, for two processes need not hold a large model at once.
    digest = digest_elsewhere(package, execution)
    cases, _ = compare_all(
        checkpoint,
        model,
        manifest.generation,
        package.path,
        found.comparison,
        progress,
        execution,
        found.half,
    )
    found.check_loss()
    if digest != (again := digest_of(package, execution)):
        raise CertificateError(
            f"{package.path}: two processes on {use.gpu} compute different outputs, with SHA-256 "
            f"{shortened(digest)[:16]} and {again[:16]}; a kernel is chosen by chance"
        )
    invariant = found.comparison.batch_invariant and len(use.buckets) <= 1
    return found.certificate(use, cases, invariant, digest)


class _Found:
    """What a package is held to on a device, and how it does."""

    def __init__(self, package: Package, model: nn.Module) -> None:
        form, self._loss = package.manifest.format, package.manifest.certificate.loss
        self.comparison = Comparison(needs_equal_bits=False)
        self.half: Half | None = None
        if form.precision != "fp32" or self._loss:
            self.comparison = LossyComparison()
        if form.precision != "fp32" and not self._loss:
            self.half = Half(half_of(model, form.precision), HalfComparison(form.precision))

    def check_loss(self) -> None:
        """Raise CertificateError if more was lost than the package may lose."""
        if self._loss and isinstance(self.comparison, LossyComparison):
            check_loss(self.comparison, None, limits_of(self._loss))

    def certificate(
        self, use: DeviceUse, cases: int, invariant: bool, digest: str
    ) -> DeviceCertificate:
        """Return what was found."""
        comparison = self.comparison
        half = self.half.found.result() if self.half else None
        tolerance: float | None = comparison.tolerance
        if self._loss and isinstance(comparison, LossyComparison):
            tolerance = self._loss.max_logit_loss * (comparison.logit_std or 1)
        return DeviceCertificate(
            gpu=use.gpu,
            driver=use.driver,
            onnxruntime=use.onnxruntime,
            buckets=use.buckets,
            cases=cases,
            tokens_compared=half.tokens_decided if half else comparison.tokens_compared,
            tokens_equal=half.tokens_equal if half else comparison.tokens_equal,
            max_abs_logit_diff=half.max_abs_logit_diff if half else comparison.max_abs_logit_diff,
            tolerance=None if half else tolerance,
            batch_invariant=invariant,
            digest=digest,
            half=half,
        )
