"""Certificates of the models: of their graphs, and of the device that runs them."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.package import DeviceCertificate, Manifest, PackageFormat, load_package
from exporter.export import export_package
from exporter.loss import LossLimits
from exporter.verify_device import verify_on_device
from loadtest.gpu_check.child import elsewhere
from loadtest.gpu_check.formats import formats_of, model_formats
from loadtest.gpu_check.models import MODELS, make_checkpoint
from loadtest.gpu_check.part import Found, Outcome, Settings

# Random weights have no favourite tokens: whatever rounding turns is counted, and nothing refused.
_ANY_LOSS = LossLimits(1.0, 100.0, 100.0)
_CORES_AN_EXPORT = 4


def export_all(settings: Settings) -> Outcome:
    """Export every model in every format, several at a time; no device is needed for it.

    The other parts then find their packages; what is missing they make themselves.
    """
    pairs = model_formats(MODELS, quick=settings.quick)

    def export(pair: tuple[str, str]) -> tuple[str, Outcome, float]:
        started = time.perf_counter()
        outcome = elsewhere(f"{__name__}:export", settings, model=pair[0], form=pair[1])
        return ".".join(pair), outcome, time.perf_counter() - started

    for model in MODELS:  # two exports of a model must not make its checkpoint at once
        make_checkpoint(model, settings.work, quick=settings.quick)
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // _CORES_AN_EXPORT)) as pool:
        done = list(pool.map(export, pairs))
    wrong = {name: outcome.summary for name, outcome, _ in done if not outcome.passed}
    found: Found = {"seconds": {name: seconds for name, _, seconds in done}, "wrong": wrong}
    summary = f"{len(done) - len(wrong)} of {len(done)} packages exported"
    return Outcome("; ".join([summary, *wrong.values()]), found, not wrong)


def export(settings: Settings, model: str, form: str) -> Outcome:
    """Export one model in one format; its graphs are compared with it on the CPU."""
    started = time.perf_counter()
    manifest = _export(settings, model, formats_of(model, quick=settings.quick)[form])
    found = {"seconds": time.perf_counter() - started}
    return Outcome(f"{manifest.certificate.cases} cases", found, passed=True)


def certify(settings: Settings, model: str, form: str) -> Outcome:
    """Export a model unless it is there, and compare it with its eager model on the device.

    There every case is computed in the decode calls that serve, and another process must find the
    same outputs.
    """
    wanted = formats_of(model, quick=settings.quick)[form]
    certificate = _export(settings, model, wanted).certificate
    found: Found = {"graphs": certificate.model_dump(mode="json")}
    if settings.device == "cpu":
        return Outcome(f"{certificate.cases} cases as they are to be on the CPU", found, True)
    started = time.perf_counter()
    checkpoint = make_checkpoint(model, settings.work, quick=settings.quick)
    package = _package(settings, model, wanted)
    shown = verify_on_device(package, checkpoint, EngineConfig(device="cuda")).certificate
    found |= {"device": shown.model_dump(mode="json"), "seconds": time.perf_counter() - started}
    return Outcome(_summary(shown), found, passed=_is_right(shown, wanted))


def _is_right(shown: DeviceCertificate, form: PackageFormat) -> bool:
    """Say whether what is designed to be bit-equal is so: numbers as they are, one bucket."""
    return shown.batch_invariant or form.is_lossy or len(shown.buckets) != 1


def _summary(shown: DeviceCertificate) -> str:
    half = shown.half
    worst = f", {half.max_case_ratio:.2f} times the eager model's error" if half else ""
    return (
        f"{shown.cases} cases, {shown.tokens_equal} of {shown.tokens_compared} tokens equal, "
        f"largest difference {shown.max_abs_logit_diff:.2g}{worst}, "
        f"{'bit-equal' if shown.batch_invariant else 'NOT bit-equal'} in every batch"
    )


def _export(settings: Settings, model: str, form: PackageFormat) -> Manifest:
    path = _package(settings, model, form)
    if path.is_dir():
        return load_package(path).manifest
    checkpoint = make_checkpoint(model, settings.work, quick=settings.quick)
    options: dict[str, Any] = {"limits": _ANY_LOSS} if form.is_lossy else {}
    return export_package(
        checkpoint,
        path,
        target=form.target,
        precision=form.precision,
        weights=form.weights,
        kv_cache=form.kv_cache,
        **options,
    )


def _package(settings: Settings, model: str, form: PackageFormat) -> Path:
    return settings.work / model / f"{form.precision}-{form.weights}-{form.kv_cache}"
