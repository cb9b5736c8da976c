"""Greedy tokens of an exported package, held against those of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.package.package import load_package
from engine.requests.events import SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from exporter.export import export_package
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.sources import PAD


async def check_greedy_tokens(
    directory: Path,
    twin: Any,
    *,
    num_tokens: int,
    lengths: Sequence[int] = (1, 2, 3, 5, 8, 8, 8, 8),
) -> list[list[int]]:
    """Import `source` in a directory, export it with its certificate, ask it and its twin.

    Returns the answers, which are equal, and differ from prompt to prompt.
    """
    torch.manual_seed(1)
    prompts = [torch.randint(3, PAD, (length,)).tolist() for length in lengths]
    import_checkpoint(directory / "source", directory / "checkpoint")
    export_package(directory / "checkpoint", directory / "package")

    package = load_package(directory / "package")
    engine = load_engine(package, EngineConfig(max_num_seqs=2, num_threads=1))
    assert isinstance(engine, AsyncEngine)
    await engine.start()
    try:
        answers = [await _greedy(engine, prompt, num_tokens) for prompt in prompts]
    finally:
        await engine.stop()
    expected = [_greedy_of_hugging_face(twin, prompt, num_tokens) for prompt in prompts]
    assert answers == expected
    differing = len({tuple(answer) for answer in answers})
    assert differing > len(prompts) // 2, "it hardly reads its input"
    return answers


async def _greedy(engine: AsyncEngine, prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(max_new_tokens=num_tokens)
    events = engine.generate(GenerationRequest("one", tuple(prompt), params))
    (answer,) = [e async for e in events if isinstance(e, SequenceFinished)]
    return list(answer.token_ids)


def _greedy_of_hugging_face(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        pad_token_id=PAD,
    )
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    tokens: list[int] = output[0, start:].tolist()
    return tokens
