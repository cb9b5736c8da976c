"""Serves random requests of every kind on the emulated device, whose kernels compute nothing.

Takes packages; prints as JSON for each how its requests ended and what the engine told, by path;
what the first of them gives in a process of its own is there as "process".
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.package.package import load_package
from engine.requests.events import RequestFinished
from engine.requests.request import (
    Constraint,
    GenerationRequest,
    LogitControls,
    SamplingParams,
    ScoreRequest,
)
from tests.emulated.unshown import given_settings, load_unshown_parts

NUM_REQUESTS = 48
CONFIG = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=16, prefill_chunk_size=4, own_process=False
)
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"strategy": "sampling", "top_k": 5, "num_outputs": 2},
    {"strategy": "sampling", "top_p": 0.8, "temperature": 0.7, "seed": 3},
    {"strategy": "sampling", "best_of": 3, "min_p": 0.1},
    {"strategy": "beam", "beam_width": 4},
    {"strategy": "beam", "beam_width": 3, "logprobs": 2, "num_outputs": 2},
    {"controls": LogitControls(repetition_penalty=1.3, banned_tokens=(5,))},
    {"constraint": Constraint("choice", ("yes", "no"))},
    {"prompt_logprobs": 2},
    {"alignment": True},
    {"stop_strings": ("zz",), "ignore_eos": True},
]


def request(number: int, has_source: bool, rng: np.random.Generator) -> GenerationRequest:
    kind = dict(KINDS[number % len(KINDS)])
    if not has_source:
        kind.pop("alignment", None)
    beginning = (7, 8, 9, 10, 11, 12, 13, 14)[: int(rng.integers(0, 9))]
    prompt = (*beginning, *rng.integers(3, 60, int(rng.integers(1, 9))).tolist())
    params = SamplingParams(**{"max_new_tokens": int(rng.integers(1, 12)), **kind})
    return GenerationRequest(f"r-{number}", prompt, params)


async def ending(engine: AsyncEngine, asked: GenerationRequest) -> str:
    last: object = None
    try:
        async for event in engine.generate(asked):
            last = event
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "finished" if isinstance(last, RequestFinished) else repr(last)


async def serve(path: str, config: EngineConfig = CONFIG) -> dict[str, Any]:
    package, lines, threads = load_package(path), [], set()

    def tell(line: str) -> None:
        lines.append(line)
        threads.add(threading.current_thread().name)

    engine = load_engine(package, config, tell=tell)
    assert isinstance(engine, AsyncEngine) and package.manifest.generation is not None
    await engine.start()
    has_source = package.manifest.generation.cross_cache is not None
    rng = np.random.default_rng(5)
    asked = [request(number, has_source, rng) for number in range(NUM_REQUESTS)]
    ended = await asyncio.gather(*(ending(engine, each) for each in asked))
    score = await engine.score(ScoreRequest("score", (5, 6, 7), (8, 9), 2))
    load = engine.load()
    await engine.stop()
    return {
        "ended": Counter(ended),
        "scored": len(score.positions),
        "captured": lines,
        "captured in": sorted(threads),
        "running": load.running,
    }


# What these packages give on a device was shown nowhere.
with mock.patch("engine.cuda.certificate.settings_as_shown", given_settings):
    found = {path: asyncio.run(serve(path)) for path in sys.argv[1:]}
with mock.patch("engine.factory.load_parts", load_unshown_parts):
    found["process"] = asyncio.run(serve(sys.argv[1], replace(CONFIG, own_process=None)))
print(json.dumps(found))
