"""Verifies a package on a GPU, and writes what was found there into its manifest.

That is the second stage of its certificate. The cases are those of the graphs' own stage, by the
kernels that serve: every decode call has the rows of a bucket, and a row that is alone is the only
one of them that counts. A row in a batch that is not bit-equal to itself alone is judged in its own
play. All plays are judged before any is refused, so that one run shows all.
"""

from __future__ import annotations

import os

from engine.config import EngineConfig
from engine.cuda.certificate import DeviceUse, use_of
from engine.cuda.device import open_device
from engine.errors import CertificateError
from engine.package.manifest import DeviceCertificate, Loss, Precision
from engine.package.package import MANIFEST_NAME, Package, write_manifest
from engine.wording import listed
from exporter.certificate import answers_of
from exporter.checkpoint import Checkpoint
from exporter.progress import Progress, no_progress
from exporter.prover.ahead import certify_ahead
from exporter.prover.digest import find, find_elsewhere
from exporter.prover.execution import Execution, OnDevice
from exporter.prover.judge import ExactJudge, Judge
from exporter.prover.loss import LossJudge, LossLimits
from exporter.prover.pair import GeneratingPair
from exporter.prover.players import ReferenceModel, load, play_all, program_of
from exporter.prover.plays.program import Scope
from exporter.prover.progress import Meter, seconds_for
from exporter.verification import Verification, differences, load_both

# Kernels elsewhere round the same weights, so that the mean difference of logits is about that of
# the graphs' own stage: half as much again, and a share of the logits' deviation for their type.
_MORE = 1.5
_OF_TYPE: dict[Precision, float] = {"fp32": 0.02, "fp16": 0.02, "bf16": 0.2}


def verify_on_device(
    package_dir: str | os.PathLike[str],
    checkpoint_dir: str | os.PathLike[str],
    config: EngineConfig,
    *,
    progress: Progress = no_progress,
) -> Verification[DeviceCertificate]:
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
    buckets = ", ".join(map(str, found.buckets))
    calls = f" in decode calls of {buckets} rows" if buckets else ""
    return Verification(
        package,
        f"{checkpoint.path} on {found.gpu}",
        found,
        f"{calls}, outputs reproduced by another process",
        (f"device certificate {'reproduced' if was_there else 'written'}",),
    )


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


def prove_on_device(
    package: Package,
    checkpoint: Checkpoint,
    execution: Execution,
    use: DeviceUse,
    elsewhere: str,
    progress: Progress,
) -> DeviceCertificate:
    """Compare all cases where and as `execution` says, and its outputs with those `elsewhere`.

    `use` names it in the certificate; `elsewhere` is the digest that another process found. Raises
    CertificateError that tells of every play in which the device computes something else.
    """
    manifest = package.manifest
    form, shown = manifest.format, manifest.certificate
    reference = ReferenceModel.of(checkpoint, form)
    judge: Judge
    if shown.loss:
        judge = LossJudge(banned=reference.banned)
    else:
        judge = ExactJudge(
            precision=form.precision, banned=reference.banned, needs_equal_bits=False
        )
    players = load(reference, package.path, judge, execution, form.precision)
    program = program_of(reference, Scope(shown.proof, few=shown.proof == "quick"), players)
    expected = seconds_for(program.work, reference.num_parameters)
    meter = Meter(progress, program.work, expected)
    outcome = play_all(players, program, judge, meter, all_at_once=True)
    loss = None
    if isinstance(judge, LossJudge):
        assert shown.loss is not None, "its limits are those of the package"
        loss = judge.result(
            LossLimits.of(shown.loss), answers=answers_of(outcome, reference.contract)
        )
        _check_no_more(loss, shown.loss, form.precision)
    if isinstance(players, GeneratingPair) and players.batch.is_on_device:
        certify_ahead(players.batch, players.contract)
    here = find(package, execution).digest
    if here != elsewhere:
        raise CertificateError(
            f"{package.path}: two processes on {use.gpu} compute different outputs, with SHA-256 "
            f"{here[:16]}... and {elsewhere[:16]}...; a kernel is chosen by chance"
        )
    return DeviceCertificate(
        gpu=use.gpu,
        driver=use.driver,
        onnxruntime=use.onnxruntime,
        buckets=use.buckets,
        cases=outcome.num_cases,
        tokens_compared=judge.tokens_compared,
        tokens_equal=judge.tokens_equal,
        judged=tuple(judge.judged),
        # With several buckets the rows beside decide which kernel computes one.
        batch_invariant=judge.batch_invariant and len(use.buckets) <= 1,
        loss=loss,
        digest=here,
    )


def _check_no_more(loss: Loss, of_graphs: Loss, precision: Precision) -> None:
    """Raise CertificateError if a device loses much more than the graphs' own stage did."""
    of_type = _OF_TYPE[precision] * of_graphs.logit_std
    allowed = _MORE * of_graphs.mean_abs_logit_diff + of_type
    if not loss.mean_abs_logit_diff <= allowed:
        raise CertificateError(
            f"logits are {loss.mean_abs_logit_diff:.3g} from the eager model's in the mean, "
            f"and were {of_graphs.mean_abs_logit_diff:.3g} where the package was exported; allowed "
            f"are {allowed:.3g}: a kernel computes something else here"
        )
