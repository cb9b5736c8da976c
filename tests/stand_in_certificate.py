"""Exports without comparing anything: for tests of what comes behind a certificate."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.package.manifest import (
    Certificate,
    DeviceCertificate,
    HalfPrecision,
    Loss,
    PackageFormat,
)
from exporter.export import export_package

HALF = HalfPrecision(
    positions=1,
    tokens_decided=1,
    tokens_equal=1,
    max_abs_logit_diff=0,
    logit_std=1,
    rms_diff=0,
    eager_rms_diff=0,
    max_case_ratio=0,
    max_position_ratio=0,
)
LOSS = Loss(
    mean_abs_logit_diff=1,
    logit_std=1,
    max_token_loss=1,
    max_logit_loss=1,
    max_perplexity_loss=1,
)


def export_with_stand_in(
    checkpoint: Path,
    package: Path,
    form: PackageFormat,
    *,
    device: DeviceCertificate | None = None,
) -> None:
    """Export a checkpoint with a certificate that says it was compared."""
    found = Certificate(
        cases=1,
        tokens_compared=1,
        tokens_equal=1,
        max_abs_logit_diff=0,
        tolerance=1e-4,
        batch_invariant=form.target == "cpu",
        dtype=str(form),
        half=HALF if form.has_half_stage else None,
        loss=LOSS if form.is_lossy else None,
        device=device,
        covered={},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exporter.export.certify", lambda *_, **__: found)
        export_package(
            checkpoint,
            package,
            target=form.target,
            precision=form.precision,
            weights=form.weights,
            kv_cache=form.kv_cache,
        )
