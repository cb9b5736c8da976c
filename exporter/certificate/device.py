"""Compares a package with its eager model on a device: the second stage of its certificate.

The cases are those of the graphs' own stage, by the kernels that serve: every decode call has the
rows of a bucket, and a row that is alone is the only one of them that counts. Float32 is held to
the tolerance of all packages, half precision to the bound of
exporter/certificate/half_comparison.py, what is rounded further to the limits that it was exported
with.
"""

from __future__ import annotations

from engine.errors import CertificateError
from engine.package.device_certificate import DeviceUse
from engine.package.manifest import DeviceCertificate
from engine.package.package import Package
from exporter.certificate.ahead import certify_ahead
from exporter.certificate.cases import Progress
from exporter.certificate.certificate import compare_all
from exporter.certificate.comparison import Comparison, LossyComparison
from exporter.certificate.device_digest import find
from exporter.certificate.execution import Execution
from exporter.certificate.half import half_of
from exporter.certificate.half_comparison import Half, HalfComparison
from exporter.certificate.loss import check_loss, check_no_more, limits_of
from exporter.certificate.subject import Subject, subject_of
from exporter.checkpoint import Checkpoint


def certify_device(
    package: Package,
    checkpoint: Checkpoint,
    execution: Execution,
    use: DeviceUse,
    elsewhere: str,
    progress: Progress,
) -> DeviceCertificate:
    """Compare all cases where and as `execution` says, and its outputs with those `elsewhere`.

    `use` names it in the certificate; `elsewhere` is the digest that another process found. Raises
    CertificateError at the first fault.
    """
    manifest = package.manifest
    subject = subject_of(checkpoint, manifest.format, bans=manifest.certificate.bans)
    held = _Held(package, subject)
    cases, _ = compare_all(subject, package.path, held.comparison, progress, execution, held.half)
    held.check_loss()
    if subject.contract.generation:
        runner, _ = execution.load_runners(subject.contract.generation, package.path)
        if runner.is_on_device:
            certify_ahead(runner, subject.contract.generation)
    here = find(package, execution).digest
    if here != elsewhere:
        raise CertificateError(
            f"{package.path}: two processes on {use.gpu} compute different outputs, with SHA-256 "
            f"{here[:16]}... and {elsewhere[:16]}...; a kernel is chosen by chance"
        )
    return held.certificate(use, cases, here)


class _Held:
    """What a package is held to on a device, and how it does."""

    def __init__(self, package: Package, subject: Subject) -> None:
        form, self._loss = package.manifest.format, package.manifest.certificate.loss
        self._precision = precision = form.precision
        self.comparison = Comparison(needs_equal_bits=False, banned=subject.banned)
        self.half: Half | None = None
        if precision != "fp32" or self._loss:
            self.comparison = LossyComparison(banned=subject.banned)
        if precision != "fp32" and not self._loss:
            found = HalfComparison(precision, subject.banned)
            self.half = Half(half_of(subject.model, precision), found)

    def check_loss(self) -> None:
        """Raise CertificateError if more was lost than may be, or much more than by the graphs."""
        if self._loss and isinstance(self.comparison, LossyComparison):
            check_loss(self.comparison, None, limits_of(self._loss))
            check_no_more(self.comparison, self._loss, self._precision)

    def certificate(self, use: DeviceUse, cases: int, digest: str) -> DeviceCertificate:
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
            # With several buckets the rows beside decide which kernel computes one.
            batch_invariant=comparison.batch_invariant and len(use.buckets) <= 1,
            digest=digest,
            half=half,
        )
