"""Speed of whole shapes: the product's own `bench`, and Hugging Face in turn with our engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from engine.machine import num_cores
from loadtest.lab.gpu.models import make_package, serve_unproven, shape_of
from loadtest.lab.gpu.part import Found, Outcome, Settings, is_emulated
from loadtest.lab.peers.command import starter
from loadtest.lab.peers.comparison import Plan, compare
from loadtest.lab.peers.results import Line, summarize, told
from loadtest.lab.peers.works import OURS, Engine, Setting, Work
from loadtest.lab.serve import tokenweir

_THEIRS = "loadtest.lab.gpu.hugging_face"
_BUCKETS = (1, 32, 256)  # rows of decode calls


def bench(settings: Settings, shape: str, form: str, how: str) -> Outcome:
    """Measure our engine alone; `how` is "", "topk", or "one-bucket", where rows are bit-equal."""
    package = make_package(settings, f"{shape}.{form}")
    most = max(settings.concurrencies)
    buckets = (most,) if how == "one-bucket" else (*(n for n in _BUCKETS if n < most), most)
    target = package.with_name("bench.json")
    target.unlink(missing_ok=True)
    num_prompt, num_new = work_of(settings, shape)
    code, said = tokenweir(
        *("bench", package, "--json", target, *_on_device(settings, package, buckets)),
        *("--prompt-tokens", num_prompt, "--new-tokens", num_new),
        *("--concurrency", ",".join(map(str, settings.concurrencies))),
        *("--rounds", settings.rounds),
        *(("--strategy", "topk") if how == "topk" else ()),
    )
    if code:
        return Outcome(said, {"exit_code": code}, passed=False)
    report = json.loads(target.read_text())
    lines = [
        f"{one['concurrency']}: {one['tokens_per_second']:,.0f} tokens/s"
        + (f", a step {1e3 * step['total']:.2f} ms" if (step := one["decode_step"]) else "")
        for one in report["results"]
    ]
    return Outcome(f"loaded in {report['load_seconds']:.0f} s; {'; '.join(lines)}", report)


def _on_device(settings: Settings, package: Path, buckets: tuple[int, ...]) -> tuple[str, ...]:
    if settings.device == "cpu":
        return ("--device", "cpu")
    serve_unproven(package, buckets)
    return ("--decode-buckets", ",".join(map(str, buckets)))


def work_of(settings: Settings, shape: str) -> tuple[int, int]:
    """Return how many tokens a prompt has, and how many are to follow."""
    if settings.quick:
        return 6, 4
    return (32, 32) if "encoder_layers" in shape_of(shape, quick=False) else (128, 64)


def speed(settings: Settings, shape: str, form: str) -> Outcome:
    """Compare with Hugging Face: `generate` with a static cache, compiled, and torch eager.

    A ratio is their time over ours, in turns on the same GPU: above 1 we are faster. Without one of
    them the part fails; only the emulated device has none of torch.
    """
    package = make_package(settings, f"{shape}.{form}")
    named = package.with_name(f"tokenweir-{form}")  # the place in which our adapter looks
    if not named.exists():
        named.symlink_to(package.name)
    num_prompt, num_new = work_of(settings, shape)
    setting: Setting = {"quick": int(settings.quick), "num_prompt_tokens": num_prompt}
    peers = (
        Engine(title, _THEIRS, f"{shape} {form} {mode}", OURS, settings=(setting,))
        for title, mode in (("Hugging Face generate", "static"), ("torch eager", "eager"))
    )
    work = Work(shape, shape, num_prompt, num_new, (Engine(OURS, "tokenweir", form), *peers))
    log = package.with_name("engines.log")
    lines: list[Line] = []
    missing: dict[str, str] = {}
    found: Found = {"lines": [], "runs": [], "missing": missing, "versions": {}}
    for concurrency in settings.concurrencies:  # by itself: what is compiled is so for one number
        serve_unproven(package, (concurrency,))
        plan = Plan(
            work=work,
            concurrencies=(concurrency,),
            num_rounds=settings.rounds,
            num_threads=num_cores(),
            vocab_size=int(shape_of(shape, quick=settings.quick)["vocab_size"]),
            directory=package.parent,
        )
        seen = compare(plan, starter(work, log), lambda text: print(text, flush=True))
        lines += (of_it := summarize(work, seen))
        found["lines"] += map(asdict, of_it)
        found["runs"] += [asdict(run) for run in seen.runs]
        found["versions"] |= seen.versions
        missing |= {f"{name} at {concurrency}": why for name, why in seen.missing.items()}
    print(log.read_text(errors="replace") if log.exists() else "", flush=True)
    said = [*map(told, lines)]
    said += [f"without {name}: {why}" for name, why in missing.items()]
    ours = {line.concurrency for line in lines if line.engine == OURS}
    is_whole = ours == {*settings.concurrencies} and (not missing or is_emulated())
    return Outcome("; ".join(said), found, None if is_whole else False)
