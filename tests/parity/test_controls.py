"""Greedy search and beams under controls, batched, give the tokens of `generate`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
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

RUNS = tuple((a, b) for a in range(0, 37, 2) for b in range(0, 37, 2))
BEGINNINGS = tuple(range(0, 20))
# Options of a request, what is asked of `generate` instead.
CONTROLS: list[tuple[LogitControls | dict[str, Any], dict[str, Any]]] = [
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
    (
        # Every second one after any other.
        LogitControls(banned_sequences=RUNS, begin_banned_tokens=BEGINNINGS),
        {"bad_words_ids": [list(run) for run in RUNS], "begin_suppress_tokens": [*BEGINNINGS]},
    ),
    ({"forced_end": EOS}, {"forced_eos_token_id": EOS}),
    (LogitControls(encoder_no_repeat_ngram=1), {"encoder_no_repeat_ngram_size": 1}),
]
# Controls of the first token, for a model with an encoder: others' first token is the prompt's.
FORCED: list[tuple[LogitControls | dict[str, Any], dict[str, Any]]] = [
    (
        {"forced_begin": (9,), "controls": LogitControls(begin_banned_tokens=BEGINNINGS)},
        {"forced_bos_token_id": 9, "begin_suppress_tokens": [*BEGINNINGS]},
    ),
    (
        {"forced_begin": (7,), "forced_end": EOS, "min_new_tokens": 0},
        {"forced_bos_token_id": 7, "forced_eos_token_id": EOS, "min_new_tokens": None},
    ),
]
MIN_NEW, MAX_NEW = 4, 10
SEARCHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (  # the defaults of transformers
        {"strategy": "beam", "beam_width": 4, "length_penalty": 1.0, "beam_end": "estimate"},
        {"num_beams": 4},
    ),
    (
        {"strategy": "beam", "beam_width": 3, "length_penalty": -0.5, "beam_end": "enough"},
        {"num_beams": 3, "length_penalty": -0.5, "early_stopping": True},
    ),
    (
        {"strategy": "beam", "beam_width": 4, "length_penalty": 1.0, "beam_end": "estimate"}
        | {"renormalize": True},
        {"num_beams": 4, "renormalize_logits": True},
    ),
]


@pytest.mark.parametrize(("name", "setup"), twins())
async def test_tokens_under_controls_are_those_of_generate(
    name: str, setup: Setup, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    twin: Any = {"gpt2": save_gpt2, "marian": save_marian}[name](source)
    import_checkpoint(source, tmp_path / "checkpoint")
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, VOCAB_SIZE - 1, (5,), generator=generator).tolist()
    prompt += [EOS] if name == "marian" else []
    package = export_unproven(tmp_path / "checkpoint", setup.form).package
    engine = setup.load(package, EngineConfig(max_num_seqs=5, num_threads=1))
    await engine.start()

    async def ask(options: LogitControls | dict[str, Any], search: dict[str, Any]) -> list[int]:
        given = {"controls": options} if isinstance(options, LogitControls) else options
        limits = {"min_new_tokens": MIN_NEW, "max_new_tokens": MAX_NEW}
        params = SamplingParams(**{**limits, **given, **search})
        banned = (*params.controls.banned_tokens, PAD)  # the Marian model's favourite
        params = replace(params, controls=replace(params.controls, banned_tokens=banned))
        asked = GenerationRequest("one", tuple(prompt), params)
        events = [event async for event in engine.generate(asked)]
        (end,) = [event for event in events if isinstance(event, SequenceFinished)]
        return list(end.token_ids)

    try:
        pairs = CONTROLS + (FORCED if name == "marian" else [])
        asked = [(*pair, *search) for pair in pairs for search in SEARCHES]
        found = await asyncio.gather(*(ask(ours, how) for ours, _, how, _ in asked))
    finally:
        await engine.stop()

    wanted = [generate(twin, prompt, **options, **how) for _, options, _, how in asked]
    assert found == wanted
    assert len(set(map(tuple, wanted))) > len(CONTROLS)  # the controls make a difference


@torch.no_grad()
def generate(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """Return the new tokens that transformers generates."""
    bad_words = [*options.pop("bad_words_ids", []), [PAD]]
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        bad_words_ids=bad_words,
        pad_token_id=PAD,
        **{
            "do_sample": False,
            "num_beams": 1,
            "min_new_tokens": MIN_NEW,
            "max_new_tokens": MAX_NEW,
            **options,
        },
    )[0].tolist()
    return output[1 if model.config.is_encoder_decoder else len(prompt) :]
