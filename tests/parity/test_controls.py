"""Greedy search under controls, batched with its likes, gives the tokens of `generate`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.requests.events import SequenceFinished
from engine.requests.request import GenerationRequest, LogitControls, SamplingParams
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.sources import EOS, PAD, VOCAB_SIZE, save_gpt2, save_marian
from tests.parity.conftest import Setup, export_unproven, twins

# The controls of a request, what is asked of `generate` instead.
CONTROLS: list[tuple[LogitControls, dict[str, Any]]] = [
    (LogitControls(), {}),
    (LogitControls(repetition_penalty=1.8), {"repetition_penalty": 1.8}),
    (LogitControls(repetition_penalty=0.6), {"repetition_penalty": 0.6}),
    (LogitControls(no_repeat_ngram=2), {"no_repeat_ngram_size": 2}),
    (LogitControls(no_repeat_ngram=1), {"no_repeat_ngram_size": 1}),
    (
        LogitControls(repetition_penalty=1.3, no_repeat_ngram=3),
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    ),
    (
        LogitControls(logit_bias=((3, 4.0), (5, -6.0))),
        {"sequence_bias": [[[3], 4.0], [[5], -6.0]]},
    ),
    (
        LogitControls(banned_tokens=tuple(range(0, 20, 2))),
        {"bad_words_ids": [[i] for i in range(0, 20, 2)]},
    ),
]
MIN_NEW, MAX_NEW = 4, 10


@pytest.mark.parametrize(("name", "setup"), twins("gpt2"))
async def test_tokens_under_controls_are_those_of_generate(
    name: str, setup: Setup, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    twin = {"gpt2": save_gpt2, "marian": save_marian}[name](source)
    import_checkpoint(source, tmp_path / "checkpoint")
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(0, VOCAB_SIZE - 1, (5,), generator=generator).tolist()
        + ([EOS] if name == "marian" else [])
        for _ in range(3)
    ]
    package = export_unproven(tmp_path / "checkpoint", setup.form).package
    engine = setup.load(package, EngineConfig(max_num_seqs=5, num_threads=1))
    await engine.start()

    async def ask(prompt: list[int], controls: LogitControls) -> list[int]:
        params = SamplingParams(controls=controls, min_new_tokens=MIN_NEW, max_new_tokens=MAX_NEW)
        asked = GenerationRequest("one", tuple(prompt), params)
        events = [event async for event in engine.generate(asked)]
        (end,) = [event for event in events if isinstance(event, SequenceFinished)]
        return list(end.token_ids)

    try:
        asked = [(prompt, *pair) for prompt in prompts for pair in CONTROLS]
        found = await asyncio.gather(*(ask(prompt, controls) for prompt, controls, _ in asked))
    finally:
        await engine.stop()

    wanted = [generate(twin, prompt, **options) for prompt, _, options in asked]
    assert found == wanted
    assert len(set(map(tuple, wanted))) > len(CONTROLS)  # the controls make a difference


@torch.no_grad()
def generate(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """Return the new tokens that transformers generates."""
    bad_words = options.pop("bad_words_ids", []) + (model.generation_config.bad_words_ids or [])
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=1,
        min_new_tokens=MIN_NEW,
        max_new_tokens=MAX_NEW,
        bad_words_ids=bad_words or None,
        pad_token_id=PAD,
        **options,
    )[0].tolist()
    return output[1 if model.config.is_encoder_decoder else len(prompt) :]
