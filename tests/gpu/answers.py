"""Asks an engine on the GPU; as a program it does so in a process of its own."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.package.package import Package, load_package
from engine.requests.events import SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams

NUM_PROMPTS = 24

Answer = tuple[tuple[int, ...], float, object]  # tokens, the sum of their logprobs, these


def prompts(package: Package) -> list[tuple[int, ...]]:
    contract = package.manifest.generation
    assert contract is not None and contract.cross_cache is not None
    longest, rng = contract.cross_cache.max_len, np.random.default_rng(0)
    lengths = [1, longest, *rng.integers(1, longest + 1, NUM_PROMPTS)]
    return [tuple(rng.integers(3, contract.vocab_size, length).tolist()) for length in lengths]


async def answers(path: Path, *, at_once: bool) -> list[Answer]:
    """Return what the engine says to every prompt, one after the other or all at once."""
    package = load_package(path)
    engine = load_engine(package, EngineConfig(max_num_seqs=0))
    assert isinstance(engine, AsyncEngine)
    await engine.start()

    async def ask(number: int, prompt: tuple[int, ...]) -> Answer:
        request = GenerationRequest(f"request-{number}", prompt, SamplingParams(logprobs=2))
        events = [event async for event in engine.generate(request)]
        (end,) = (event for event in events if isinstance(event, SequenceFinished))
        return end.token_ids, end.sum_logprob, end.logprobs

    asked = [ask(number, prompt) for number, prompt in enumerate(prompts(package))]
    try:
        return list(await asyncio.gather(*asked)) if at_once else [await one for one in asked]
    finally:
        await engine.stop()


def digest(found: list[Answer]) -> str:
    return hashlib.sha256(repr(found).encode()).hexdigest()  # repr gives every bit of a float


if __name__ == "__main__":
    print(digest(asyncio.run(answers(Path(sys.argv[1]), at_once=True))))
