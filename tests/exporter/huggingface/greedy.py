"""Tokens of an exported package with its defaults, held against those of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.package.package import load_package
from engine.requests.defaults import sampling_params
from engine.requests.events import SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from exporter.export import export_package
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.sources import PAD

LENGTHS = (1, 2, 3, 5, 8, 8, 8, 8)
Options = dict[str, Any]


async def check_greedy_tokens(
    directory: Path,
    twin: Any,
    *,
    num_tokens: int,
    num_beams: int = 1,
    lengths: Sequence[int] = LENGTHS,
    max_len: int | None = None,
) -> list[list[int]]:
    """Do as `check_tokens` for greedy search, or for so many beams, that ends at `num_tokens`."""
    asked: Options = {"strategy": "greedy", "max_new_tokens": num_tokens}
    if num_beams > 1:
        asked |= {"strategy": "beam", "beam_width": num_beams}
    theirs = {"do_sample": False, "num_beams": num_beams, "max_new_tokens": num_tokens}
    return await check_tokens(directory, twin, [(asked, theirs)], lengths, max_len)


async def check_tokens(
    directory: Path,
    twin: Any,
    searches: Sequence[tuple[Options, Options]],
    lengths: Sequence[int] = LENGTHS,
    max_len: int | None = None,
) -> list[list[int]]:
    """Import `source` in a directory, export it with its certificate, ask it and its twin.

    Each search is what a request names, what is given to `generate`; all else is as the source has
    it. Returns the answers, which are equal, and differ from prompt to prompt.
    """
    prompts = draw_prompts(lengths)
    import_checkpoint(directory / "source", directory / "checkpoint", max_len=max_len)
    export_package(directory / "checkpoint", directory / "package")

    package = load_package(directory / "package")
    params = [sampling_params(asked, package.manifest.defaults) for asked, _ in searches]
    engine = load_engine(package, EngineConfig(max_num_seqs=4, num_threads=1))
    answers = await ask_all(engine, params, prompts)
    expected = [of_hugging_face(twin, one, theirs) for _, theirs in searches for one in prompts]
    assert answers == expected
    differing = len({tuple(answer) for answer in answers})
    assert differing > len(prompts) // 2, "it hardly reads its input"
    return answers


def draw_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Draw prompts of these lengths, always the same."""
    torch.manual_seed(1)
    return [torch.randint(3, PAD, (length,)).tolist() for length in lengths]


async def ask_all(
    engine: object, params: Sequence[SamplingParams], prompts: Sequence[list[int]]
) -> list[list[int]]:
    """Start an engine, ask it for each prompt in each way, and stop it."""
    assert isinstance(engine, AsyncEngine)
    await engine.start()
    try:
        return [await _ask(engine, prompt, one) for one in params for prompt in prompts]
    finally:
        await engine.stop()


async def _ask(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    events = engine.generate(GenerationRequest("one", tuple(prompt), params))
    (answer,) = [e async for e in events if isinstance(e, SequenceFinished)]
    return list(answer.token_ids)


def of_hugging_face(model: Any, prompt: list[int], options: Options) -> list[int]:
    """Return what `generate` writes behind a prompt."""
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=PAD, **options)
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    tokens: list[int] = output[0, start:].tolist()
    return tokens
