"""Beam search of imported models, beside greedy and sampled requests, is that of `generate`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.config import EngineConfig, RequestLimits
from engine.generation.async_engine import AsyncEngine
from engine.requests.events import FinishReason, SequenceFinished
from engine.requests.request import GenerationRequest, LogitControls, SamplingParams
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.sources import EOS, PAD, VOCAB_SIZE, save_gpt2, save_marian
from tests.parity.conftest import Setup, export_unproven, twins

MAX_NEW = 9
CONFIG = EngineConfig(
    max_num_seqs=18, max_num_batched_tokens=24, prefill_chunk_size=4, num_threads=1
)
WIDTHS = ((2, 1), (4, 4), (5, 2), (16, 5), (16, 1))  # beams, outputs
# Options of the engine, and the same of `generate`.
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
BREAK = 35  # a token whose text is in no stop string
STOPS = [("ce", "dda"), ("ef", "dba", "adc"), ("b", "fda"), ("aeb", "dd", "cd", "dade")]
OTHERS = [
    SamplingParams(max_new_tokens=MAX_NEW),
    SamplingParams("sampling", seed=1, num_outputs=2, max_new_tokens=MAX_NEW),
    SamplingParams("sampling", seed=2, top_k=5, best_of=3, max_new_tokens=MAX_NEW),
]
Found = list[tuple[list[int], float]]
FAMILIES = {"gpt2": "gpt", "marian": "encoder-decoder"}


@pytest.mark.parametrize(("name", "setup"), twins())
async def test_beams_and_scores_are_those_of_generate(
    name: str, setup: Setup, tmp_path: Path
) -> None:
    twin = save_twin(name, tmp_path / "original")
    drawn = torch.Generator().manual_seed(4)
    asked = [
        (torch.randint(3, PAD - 4, (length,), generator=drawn).tolist(), sizes, *options)
        for (sizes, options), length in zip(
            product(WIDTHS, OPTIONS), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 2, strict=True
        )
    ]
    if name == "marian":
        asked = [([*prompt, EOS], *rest) for prompt, *rest in asked]
    engine = load_twin(tmp_path, setup)
    await engine.start()

    async def ask(prompt: list[int], params: SamplingParams) -> Found:
        return [(list(e.token_ids), e.score) for e in await answer(engine, prompt, params)]

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
    for among_others, ours in zip(found[len(asked) :], alone, strict=False):
        assert [tokens for tokens, _ in among_others] == [tokens for tokens, _ in ours]
        assert among_others == ours or not setup.has_equal_bits(FAMILIES[name])
    lengths = {len(tokens) for ours in found[: len(asked)] for tokens, _ in ours}
    assert len(lengths) > 2, "hardly a hypothesis ends by itself"


@pytest.mark.long
@pytest.mark.parametrize(("name", "setup"), twins())
async def test_searches_may_be_as_wide_as_there_are_slots(
    name: str, setup: Setup, tmp_path: Path
) -> None:
    twin = save_twin(name, tmp_path / "original")
    limits = RequestLimits(max_beam_width=64)
    config = EngineConfig(max_num_seqs=64, num_threads=1, limits=limits)
    engine = load_twin(tmp_path, setup, config)
    asked = [([5, 4, EOS], (40, 3)), ([6, 7, 8, EOS], (17, 2)), ([9, EOS], (64, 2))]

    await engine.start()
    try:
        answers = await asyncio.gather(
            *(answer(engine, prompt, search(sizes, {})) for prompt, sizes in asked)
        )
    finally:
        await engine.stop()

    for ours, (prompt, sizes) in zip(answers, asked, strict=True):
        theirs = generate(twin, prompt, sizes, {})
        assert [list(one.token_ids) for one in ours] == [tokens for tokens, _ in theirs], sizes
        scores = [score for _, score in theirs]
        assert [one.score for one in ours] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize(("name", "setup"), twins())
async def test_stop_strings_end_the_hypotheses_that_they_end_in_generate(
    name: str, setup: Setup, tmp_path: Path
) -> None:
    twin = save_twin(name, tmp_path / "original")
    tokenizer = letter_tokenizer()
    tokenizer.save(str(tmp_path / "original" / "tokenizer.json"))
    engine = load_twin(tmp_path, setup)
    drawn = torch.Generator().manual_seed(5)
    options = {"controls": LogitControls(logit_bias=((EOS, -4.0),))}  # so that texts get longer
    # generate looks for stop strings in a decoder's prompt too; behind BREAK none goes on.
    last = EOS if name == "marian" else BREAK
    asked = [
        ([*torch.randint(3, BREAK, (length,), generator=drawn).tolist(), last], sizes, stops)
        for (sizes, stops), length in zip(
            product(WIDTHS, STOPS), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 2, strict=True
        )
    ]

    await engine.start()
    try:
        answers = await asyncio.gather(
            *(
                answer(engine, prompt, search(sizes, {"stop_strings": stops, **options}))
                for prompt, sizes, stops in asked
            )
        )
    finally:
        await engine.stop()

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    for ours, (prompt, sizes, stops) in zip(answers, asked, strict=True):
        options = {"sequence_bias": [[[EOS], -4.0]], "stop_strings": list(stops), "tokenizer": fast}
        theirs = generate(twin, prompt, sizes, options)
        assert [list(one.token_ids) for one in ours] == [tokens for tokens, _ in theirs], stops
        scores = [score for _, score in theirs]
        assert [one.score for one in ours] == pytest.approx(scores, abs=1e-4)
        for one in (one for one in ours if one.reason is FinishReason.STOP):
            assert isinstance(one.matched_stop, str)
            whole = tokenizer.decode(list(one.token_ids))
            assert whole.startswith(one.text + one.matched_stop)
            assert not any(stop in one.text for stop in stops)
    reasons = [one.reason for ours in answers for one in ours]
    assert 10 < reasons.count(FinishReason.STOP) < len(reasons) - 5


def save_twin(name: str, path: Path) -> Any:
    """Make a model of Hugging Face and save it."""
    twin: Any = {"gpt2": save_gpt2, "marian": save_marian}[name](path)
    return twin


def load_twin(path: Path, setup: Setup, config: EngineConfig = CONFIG) -> AsyncEngine:
    """Import and export the model at `path/original`, and load it."""
    import_checkpoint(path / "original", path / "checkpoint")
    return setup.load(export_unproven(path / "checkpoint", setup.form).package, config)


def letter_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of one and two letters, and signs for the special tokens."""
    names = [*"abcdef", *(a + b for a, b in product("abcdef", repeat=2))][:VOCAB_SIZE]
    for sign, token_id in zip("!#$%", (28, EOS, BREAK, PAD), strict=True):  # 28 ends the GPT-2's
        names[token_id] = sign
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    made.decoder = decoders.ByteLevel()
    return made


async def answer(
    engine: AsyncEngine, prompt: list[int], params: SamplingParams
) -> list[SequenceFinished]:
    """Return the sequences of an answer, best first."""
    events = engine.generate(GenerationRequest("one", tuple(prompt), params))
    found = [event async for event in events if isinstance(event, SequenceFinished)]
    return sorted(found, key=lambda e: e.index)


def search(sizes: tuple[int, int], options: dict[str, Any]) -> SamplingParams:
    width, outputs = sizes
    controls = options.get("controls", LogitControls())
    banned = (*controls.banned_tokens, PAD)  # the Marian model's favourite
    options = {**options, "controls": replace(controls, banned_tokens=banned)}
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
    bad_words = [*options.get("bad_words_ids", []), [PAD]]
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
        **{**options, "bad_words_ids": bad_words},
    )
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    rows = [[t for t in row[start:] if t != PAD] for row in output.sequences.tolist()]
    return list(zip(rows, output.sequences_scores.tolist(), strict=True))
