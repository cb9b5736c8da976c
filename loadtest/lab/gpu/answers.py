"""Right answers: rows of a decoder by themselves and among others, and `tokenweir verify`."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.cuda.device import open_device
from engine.package.package import load_package, read_manifest
from engine.slots.runner import SlotModelRunner
from exporter.prover.digest import find, find_elsewhere
from exporter.prover.driver import Asked, generate
from exporter.prover.execution import Execution, OnCpu, OnDevice
from exporter.prover.generation_cases import Case, random_case
from loadtest.lab.gpu.models import form_of, make_checkpoint, make_package
from loadtest.lab.gpu.part import Found, Outcome, Settings
from loadtest.lab.serve import tokenweir

_NUM_ROWS, _NUM_STEPS, _CHUNK = 8, 8, 16
_LENGTHS = (5, 50, 31, 16, 7, 17, 12, 45)  # tokens of prompts
_CERTIFIED_ROWS = 32
# Limits to the CPU's result in the same type; both round, so twice the error that one may have.
_FURTHEST = {"fp32": 1e-4, "fp16": 0.04}  # in standard deviations of the logits

Logits = np.ndarray[Any, Any]  # [cases * steps, vocab_size]


def rows(settings: Settings, model: str, form: str) -> Outcome:
    """Decode prompts alone, again, among others, in another process, and on the CPU."""
    package = load_package(make_package(settings, f"{model}.{form}"))
    contract, precision = package.manifest.generation, form_of(form).precision
    assert contract is not None, "only models that generate are looked at"
    on_cpu = OnCpu((_NUM_ROWS,))
    execution: Execution = on_cpu
    if settings.device == "cuda":
        config = EngineConfig(device="cuda", max_num_seqs=_NUM_ROWS)
        execution = OnDevice(package, config, open_device())
    rng, most = np.random.default_rng(0), contract.cache.max_len - _NUM_STEPS
    cases = [
        random_case(
            rng,
            contract,
            source_length=length,
            prompt_length=3 if contract.cross_cache else min(length, most),
            num_tokens=_NUM_STEPS,
        )
        for length in _LENGTHS
    ]
    runner, _ = execution.load_runners(contract, package.path)
    tokens = [case.chosen(generate(runner, [case], Asked(_CHUNK))[0]) for case in cases]

    def decoded(runner: SlotModelRunner, batches: list[list[Case]]) -> Logits:
        found, left = [], iter(tokens)
        for batch in batches:
            given = [next(left) for _ in batch]
            seen = generate(runner, batch, Asked(_CHUNK), given)
            found += [np.array(one.all_logits) for one in seen]
        return np.concatenate(found)

    alone = decoded(runner, [[case] for case in cases])
    is_equal = {
        "again": np.array_equal(alone, decoded(runner, [[case] for case in cases])),
        "among others": np.array_equal(alone, decoded(runner, [cases])),
        "in another process": _is_found_elsewhere(package, execution),
    }
    computes = bool(np.isfinite(alone).all()) and not np.array_equal(alone[0], alone[_NUM_STEPS])
    found: Found = {"computes": computes, "is_equal": is_equal}
    said = [f"{'equal' if yes else 'NOT equal'} {where}" for where, yes in is_equal.items()]
    right = computes and all(is_equal.values())
    if precision in _FURTHEST:  # no CPU computes bf16
        theirs = decoded(on_cpu.load_runners(contract, package.path)[0], [cases])
        away = float(np.nan_to_num(np.abs(alone - theirs).max(), nan=np.inf))
        found["stds_from_cpu"] = away / float(theirs.std(-1).mean())
        found["tokens_equal"] = int((alone.argmax(-1) == theirs.argmax(-1)).sum())
        right = right and found["stds_from_cpu"] <= _FURTHEST[precision]
        said.append(
            f"{found['stds_from_cpu']:.2g} standard deviations from the CPU, "
            f"{found['tokens_equal']} of {len(alone)} tokens equal"
        )
    return Outcome(", ".join([*([] if computes else ["NOTHING computed"]), *said]), found, right)


def _is_found_elsewhere(package: Any, execution: Execution) -> bool:
    return find(package, execution).digest == find_elsewhere(package, execution).digest


def certificate(settings: Settings, model: str, form: str) -> Outcome:
    """Compare a package with its eager model on the device, by the product's own `verify`."""
    package = make_package(settings, f"{model}.{form}")
    options = ["--device", "cuda"] if settings.device == "cuda" else []
    if options and read_manifest(package).generation is not None:
        options += ["--max-num-seqs", str(_CERTIFIED_ROWS)]
    code, said = tokenweir("verify", package, make_checkpoint(settings, model), *options)
    shown = read_manifest(package).certificate.device
    if code or shown is None:
        return Outcome(said, {"exit_code": code}, passed=code == 0)
    times = (one.exported.median / max(one.eager.median, 1e-30) for one in shown.judged)
    bits = "bit-equal" if shown.batch_invariant else "NOT bit-equal"
    summary = (
        f"{shown.cases} cases, {shown.tokens_equal} of {shown.tokens_compared} tokens equal, "
        f"at most {max(times, default=0):.2f} times the eager model's loss, {bits} in every batch"
    )
    # Rounded weights are not promised to be.
    right = shown.batch_invariant or form_of(form).is_lossy or not shown.buckets
    return Outcome(summary, shown.model_dump(mode="json"), right)
