"""Certificates of the models: of their graphs, and of the device that runs them."""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

from engine.config import EngineConfig
from engine.errors import CertificateError
from engine.package.manifest import DeviceCertificate, Manifest, PackageFormat
from engine.package.package import load_package
from exporter.export import export_package
from exporter.prover.loss import LossLimits
from exporter.verify_device import verify_on_device
from loadtest.gpu_check.child import elsewhere
from loadtest.gpu_check.formats import formats_of, model_formats
from loadtest.gpu_check.models import MODELS, make_checkpoint
from loadtest.gpu_check.part import Found, Outcome, Settings

# Random weights have no favourite tokens, and the largest of many differences says little: both are
# counted, and what is held to a limit is the mean difference, as a share of the logits' own spread.
_ANY_LOSS = LossLimits(1.0, 100.0, 100.0, 1.0)
_MOST_LOST = 0.4  # logits that know nothing of the eager model's are 0.8 away as zeros, else more
_CORES_AN_EXPORT = 4


def export_all(settings: Settings) -> Outcome:
    """Export every model in every format, several at a time; no device is needed for it.

    The other parts then find their packages; what is missing they make themselves.
    """
    for model in MODELS:  # two exports of a model must not make its checkpoint at once
        make_checkpoint(model, settings.work, quick=settings.quick)
    groups = _core_groups()
    free: Queue[set[int]] = Queue()
    for group in groups:
        free.put(group)
    with ThreadPoolExecutor(len(groups), initializer=lambda: _stay_on(free.get())) as pool:
        pairs = model_formats(MODELS, quick=settings.quick)
        done = list(pool.map(partial(_export_elsewhere, settings), pairs))
    wrong = {name: f"{name}: {outcome.summary}" for name, outcome, _ in done if not outcome.passed}
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
    ratios = (one.exported.median / max(one.eager.median, 1e-30) for one in shown.judged)
    worst = (
        f", {most:.2f} times the eager model's median" if (most := max(ratios, default=0)) else ""
    )
    return (
        f"{shown.cases} cases, {shown.tokens_equal} of {shown.tokens_compared} tokens equal, "
        f"largest difference {shown.max_abs_logit_diff:.2g}{worst}, "
        f"{'bit-equal' if shown.batch_invariant else 'NOT bit-equal'} in every batch"
    )


def _core_groups() -> list[set[int]]:
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, len(cores) // _CORES_AN_EXPORT)
    return [set(cores[i::count]) for i in range(count)]


def _stay_on(cores: set[int]) -> None:
    """Keep this thread, and the processes that it starts, on some cores."""
    os.sched_setaffinity(0, cores)


def _export_elsewhere(settings: Settings, pair: tuple[str, str]) -> tuple[str, Outcome, float]:
    """Return the name of a package, what its export came to, and the seconds of it."""
    model, form = pair
    started = time.perf_counter()
    try:
        outcome = elsewhere(f"{__name__}:export", settings, model=model, form=form)
    except subprocess.CalledProcessError as error:
        outcome = Outcome(f"its process ended with {error.returncode}", {}, False)
    seconds = time.perf_counter() - started
    print(f"{model}.{form}: {outcome.summary} in {seconds:.0f} s", flush=True)
    return f"{model}.{form}", outcome, seconds


def _export(settings: Settings, model: str, form: PackageFormat) -> Manifest:
    """Return what an export says of itself; CertificateError if it lost too much."""
    path = _package(settings, model, form)
    manifest = load_package(path).manifest if path.is_dir() else _write(settings, model, form)
    loss = manifest.certificate.loss
    if loss and not loss.mean_abs_logit_diff <= _MOST_LOST * loss.logit_std:
        raise CertificateError(
            f"{path}: logits are {loss.mean_abs_logit_diff:.3g} from the eager model's in the "
            f"mean, allowed are {_MOST_LOST} of their standard deviation, {loss.logit_std:.3g}: "
            "more is wrong than what rounding loses"
        )
    return manifest


def _write(settings: Settings, model: str, form: PackageFormat) -> Manifest:
    checkpoint = make_checkpoint(model, settings.work, quick=settings.quick)
    options: dict[str, Any] = {"limits": _ANY_LOSS} if form.is_lossy else {}
    return export_package(
        checkpoint,
        _package(settings, model, form),
        target=form.target,
        precision=form.precision,
        weights=form.weights,
        kv_cache=form.kv_cache,
        **options,
    )


def _package(settings: Settings, model: str, form: PackageFormat) -> Path:
    return settings.work / model / f"{form.precision}-{form.weights}-{form.kv_cache}"
