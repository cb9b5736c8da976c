"""Certificates that compared nothing: for tests of what comes behind one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.package.manifest import (
    Answers,
    Certificate,
    DeviceCertificate,
    Judged,
    Loss,
    PackageFormat,
    Quantiles,
    Task,
)
from engine.package.package import MANIFEST_NAME, seal

if TYPE_CHECKING:
    from exporter.checkpoint import Checkpoint

PLAIN = PackageFormat()
LOSS = Loss(
    mean_abs_logit_diff=1,
    logit_std=1,
    max_token_loss=1,
    max_logit_loss=1,
    max_perplexity_loss=1,
    max_vector_loss=1,
)
ANSWERS = Answers(items=1)


def judged(times: float = 1.0, **changes: Any) -> Judged:
    """Return a play in which the graph loses so many times what the eager model does."""
    fields: dict[str, Any] = {
        "play": "alone",
        "what": "logits",
        "positions": 5000,
        "exported": quantiles(times),
        "eager": quantiles(),
        "runs": 1,
        "floor": 1e-7,
    }
    return Judged(**fields | changes)


def quantiles(times: float = 1.0, **changes: float) -> Quantiles:
    """Return what an eager model loses, so many times."""
    fields = {"median": 1e-6, "p90": 2e-6, "p99": 4e-6, "largest": 1e-5}
    return Quantiles(**{name: times * value for name, value in fields.items()} | changes)


def certificate(
    form: PackageFormat = PLAIN, task: Task = "generate", **changes: Any
) -> Certificate:
    """Return the certificate of a package, with some fields changed."""
    fields: dict[str, Any] = {
        **_compared(form),
        "batch_invariant": form.target == "cpu",
        "proof": "standard",
        "dtype": str(form),
        "half": (judged(),) if form.has_half_stage else (),
        "answers": None if task == "generate" else ANSWERS,
        "covered": {},
    }
    return Certificate(**fields | changes)


def shown_on_device(form: PackageFormat = PLAIN, **changes: Any) -> DeviceCertificate:
    """Return what was shown on a device, with some fields changed."""
    fields: dict[str, Any] = {
        **_compared(form),
        "gpu": "NVIDIA H200",
        "driver": "13.0",
        "onnxruntime": "1.31.1",
        "buckets": (32,),
        "batch_invariant": True,
        "digest": "0" * 64,
    }
    return DeviceCertificate(**fields | changes)


def export_with_stand_in(
    checkpoint: Path,
    package: Path,
    form: PackageFormat,
    *,
    device: DeviceCertificate | None = None,
) -> None:
    """Export a checkpoint with a certificate that says it was compared."""
    from exporter.export import export_package
    from exporter.graphs.contracts import contract_of

    def prove(given: Checkpoint, *_: object, **__: object) -> Certificate:
        return certificate(form, contract_of(given.config.model).task, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exporter.export.prove", prove)
        patch.setattr("exporter.export.expected_seconds", lambda *_: 0.0)
        export_package(
            checkpoint,
            package,
            target=form.target,
            precision=form.precision,
            weights=form.weights,
            kv_cache=form.kv_cache,
        )


def _compared(form: PackageFormat) -> dict[str, Any]:
    return {
        "cases": 1,
        "tokens_compared": 96,
        "tokens_equal": 96,
        "judged": () if form.is_lossy else (judged(),),
        "loss": LOSS if form.is_lossy else None,
    }


def edit_manifest(package: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit a manifest as somebody does who knows of the digest."""
    content = json.loads((package / MANIFEST_NAME).read_bytes())
    del content["digest"]
    change(content)
    (package / MANIFEST_NAME).write_bytes(seal(content))
