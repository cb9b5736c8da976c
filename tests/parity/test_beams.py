"""Beam search of imported models, beside greedy and sampled requests, is that of `generate`."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.factory import load_engine
from engine.package import load_package
from engine.request import GenerationRequest, LogitControls, SamplingParams, SequenceFinished
from exporter.export import export_package
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.sources import EOS, PAD, save_gpt2, save_marian

MAX_NEW = 9
WIDTHS = ((2, 1), (4, 4), (5, 2), (16, 5), (16, 1))  # beams, outputs
# Of the engine, of `generate`.
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"min_new_tokens": 5}, {"min_new_tokens": 5}),
    (
        {"controls": LogitControls(repetition_penalty=1.5, no_repeat_ngram=2)},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ),
    (
        {"controls": LogitControls(logit_bias=((3, 1.0),), banned_tokens=(4, 5, 6))},
        {"sequence_bias": [[[3], 1.0]], "bad_words_ids": [[4], [5], [6]]},
    ),
]
OTHERS = [
    SamplingParams(max_new_tokens=MAX_NEW),
    SamplingParams("sampling", seed=1, num_outputs=2, max_new_tokens=MAX_NEW),
    SamplingParams("sampling", seed=2, top_k=5, best_of=3, max_new_tokens=MAX_NEW),
]
Found = list[tuple[list[int], float]]


@pytest.mark.parametrize("name", ["gpt2", "marian"])
async def test_beams_and_scores_are_those_of_generate(name: str, tmp_path: Path) -> None:
    twin: Any = {"gpt2": save_gpt2, "marian": save_marian}[name](tmp_path / "source")
    if name == "marian":  # else its padding takes part in scores there, though it is never written
        twin.final_logits_bias[0, PAD] = -1e9
        twin.save_pretrained(tmp_path / "source")
    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")
    export_package(tmp_path / "checkpoint", tmp_path / "package")
    drawn = torch.Generator().manual_seed(4)
    asked = [
        (torch.randint(3, PAD - 4, (length,), generator=drawn).tolist(), sizes, *options)
        for (sizes, options), length in zip(
            product(WIDTHS, OPTIONS), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 2, strict=True
        )
    ]
    if name == "marian":
        asked = [([*prompt, EOS], *rest) for prompt, *rest in asked]
    config = EngineConfig(
        max_num_seqs=18, max_num_batched_tokens=24, prefill_chunk_size=4, num_threads=1
    )
    engine = load_engine(load_package(tmp_path / "package"), config)
    assert isinstance(engine, AsyncEngine)
    await engine.start()

    async def ask(prompt: list[int], params: SamplingParams) -> Found:
        events = engine.generate(GenerationRequest("one", tuple(prompt), params))
        found = [event async for event in events if isinstance(event, SequenceFinished)]
        return [(list(e.token_ids), e.score) for e in sorted(found, key=lambda e: e.index)]

    try:
        searches = [ask(p, search(sizes, options)) for p, sizes, options, _ in asked]
        others = [ask(prompt, params) for prompt, *_ in asked for params in OTHERS]
        found = await asyncio.gather(*searches, *others)
        alone = [await ask(prompt, params) for prompt, *_ in asked[:4] for params in OTHERS]
    finally:
        await engine.stop()

    for ours, (prompt, sizes, _, options) in zip(found, asked, strict=False):
        theirs = generate(twin, prompt, sizes, options)
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs], (prompt, options)
        scores = [score for _, score in theirs]
        assert [score for _, score in ours] == pytest.approx(scores, abs=1e-4)
    assert found[len(asked) :][: len(alone)] == alone
    lengths = {len(tokens) for ours in found[: len(asked)] for tokens, _ in ours}
    assert len(lengths) > 2, "hardly a hypothesis ends by itself"


def search(sizes: tuple[int, int], options: dict[str, Any]) -> SamplingParams:
    width, outputs = sizes
    return SamplingParams(
        "beam",
        beam_width=width,
        num_outputs=outputs,
        length_penalty=0.0,
        max_new_tokens=MAX_NEW,
        **options,
    )


@torch.no_grad()
def generate(
    model: Any, prompt: list[int], sizes: tuple[int, int], options: dict[str, Any]
) -> Found:
    """Return the new tokens and scores of `generate`, best first."""
    width, outputs = sizes
    bad_words = options.get("bad_words_ids", []) + (model.generation_config.bad_words_ids or [])
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=width,
        num_return_sequences=outputs,
        length_penalty=0.0,
        early_stopping="never",
        max_new_tokens=MAX_NEW,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
        **{**options, "bad_words_ids": bad_words or None},
    )
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    rows = [[t for t in row[start:] if t != PAD] for row in output.sequences.tolist()]
    return list(zip(rows, output.sequences_scores.tolist(), strict=True))
