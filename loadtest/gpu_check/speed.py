"""Whole requests, through our engine and through Hugging Face's, in turn on the same device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.machine import num_cores
from loadtest.gpu_check.part import Outcome, Settings, is_emulated
from loadtest.gpu_check.shapes import SHAPES, build
from loadtest.gpu_check.watch import Watch
from loadtest.lab.peers.comparison import Comparison, Plan, compare
from loadtest.lab.peers.engine_process import EngineProcess
from loadtest.lab.peers.results import Line, summarize
from loadtest.lab.peers.works import OURS, Engine, Setting, Work

CONCURRENCIES = (1, 32, 256)
_QUICK_CONCURRENCIES = (1, 3)
_QUICK_PROMPT, _QUICK_NEW = 12, 6  # tokens
_NUM_ROUNDS = 3
_LOG = "workers.log"
_ONE_BUCKET = f"{OURS} in one bucket, every decode call of 256 rows"  # so that rows are bit-equal
_LARGE = ("llama-8b",)  # which has no room beside itself


def compare_shape(settings: Settings, shape: str) -> Outcome:
    """Measure prompts alone and whole requests at 1, 32 and 256 streams; say which is faster.

    A ratio is a peer's time over ours for the same work: above 1 we are faster. Our decode calls
    have as many rows as there are streams, and in a second engine as many as there may be.
    Without one of the engines nothing is compared with it, and the part fails: only the emulated
    device has none of torch.
    """
    graphs = build(shape, settings.work / "speed", quick=settings.quick)
    work = _work(settings, shape, graphs.name)
    directory = graphs.parent
    plan = Plan(
        work=work,
        concurrencies=_QUICK_CONCURRENCIES if settings.quick else CONCURRENCIES,
        num_rounds=1 if settings.quick else _NUM_ROUNDS,
        num_threads=num_cores(),
        vocab_size=320 if settings.quick else SHAPES[shape].ours["vocab_size"],
        directory=directory,
    )
    log = directory / _LOG
    watch = Watch(lambda engine, options: EngineProcess(engine.adapter, options, log))
    found = compare(plan, watch.start, lambda text: print(text, flush=True))
    for name, why in found.missing.items():
        if name.split(" {")[0] == OURS:
            raise RuntimeError(f"our engine does not run: {why}")
    lines = summarize(work, found)
    passed = False if found.missing and not is_emulated() else None
    return Outcome(_summary(lines, found), _found(shape, lines, found, watch), passed)


def _work(settings: Settings, name: str, graphs: str) -> Work:
    shape = SHAPES[name]
    setting: Setting = {"cuda": int(settings.device == "cuda"), "quick": int(settings.quick)}
    ours = [_ours(OURS, None, graphs, {**setting, "one_bucket": 0})]
    if settings.device == "cuda" and name not in _LARGE:
        ours.append(_ours(_ONE_BUCKET, OURS, graphs, {**setting, "one_bucket": 1}))
    peers = tuple(
        Engine(
            title, "loadtest.gpu_check.hugging_face", f"{name} {mode}", OURS, settings=(setting,)
        )
        for title, mode in (
            ("Hugging Face generate, static cache", "generate"),
            ("torch eager, growing cache", "eager"),
        )
    )
    num_prompt, num_new = shape.num_prompt_tokens, shape.num_new_tokens
    if settings.quick:
        num_prompt, num_new = _QUICK_PROMPT, _QUICK_NEW
    return Work(name, name, num_prompt, num_new, (*ours, *peers))


def _ours(title: str, against: str | None, graphs: str, setting: Setting) -> Engine:
    adapter = "loadtest.gpu_check.engine_loop"
    return Engine(title, adapter, graphs, against, settings=(setting,))


def _summary(lines: tuple[Line, ...], found: Comparison) -> str:
    ratios = [
        f"{line.engine.partition(',')[0]} {line.ratio.median:.2f} at {line.concurrency}"
        for line in lines
        if line.ratio is not None
    ]
    missing = [f"without {name}: {why}" for name, why in found.missing.items()]
    return "; ".join([", ".join(ratios) or "no ratio", *missing])


def _found(shape: str, lines: tuple[Line, ...], found: Comparison, watch: Watch) -> dict[str, Any]:
    rows: list[Mapping[str, object]] = [
        {
            "streams": line.concurrency,
            "engine": line.engine,
            "tokens/s": line.tokens_per_second,
            "first token ms": 1e3 * line.first_token,
            "ms a token behind it": 1e3 * line.output_token if line.output_token else None,
            "their time / ours": line.ratio and line.ratio.median,
            "least": line.ratio and line.ratio.least,
            "largest": line.ratio and line.ratio.largest,
            "of a token": line.output_token_ratio and line.output_token_ratio.median,
            "GPU busy": watch.busy(line.engine, line.concurrency),
        }
        for line in lines
    ]
    runs = [
        {
            "engine": run.engine,
            "streams": run.concurrency,
            "turn": run.round,
            "seconds": run.seconds,
            "first_token": run.first_token,
        }
        for run in found.runs
    ]
    precision = SHAPES[shape].precision
    return {
        "tables": {f"whole requests in {precision}": rows},
        "turns": runs,
        "missing": found.missing,
        "versions": found.versions,
    }
