"""Decoders of every family compute what Hugging Face computes, as they are and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from exporter.checkpoint import load_checkpoint
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.decoders import (
    DECODERS,
    LLAMA3,
    LONG,
    MAX_LEN,
    OPT_350M,
    VARIANTS,
    YARN,
    save_decoder,
)
from tests.exporter.huggingface.encoders import save_encoder
from tests.exporter.huggingface.greedy import check_greedy_tokens
from tests.exporter.huggingface.sources import VOCAB_SIZE
from tests.exporter.huggingface.translation_sources import save as save_translation

NO_LONGER = "texts may have 24 tokens, not the 99 of --max-len: the model knows no more"


@pytest.mark.parametrize(("family", "options"), VARIANTS)
@torch.no_grad()
def test_logits_are_those_of_hugging_face(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    twin = save_decoder(tmp_path / "source", family, **options)

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    model = load_checkpoint(tmp_path / "checkpoint").model
    ids = torch.randint(0, VOCAB_SIZE, (3, model.config.max_target_len))
    expected = twin(ids).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen3", "gemma2"])
@pytest.mark.parametrize("differs", [True, False])
@torch.no_grad()
def test_an_output_of_its_own_counts_though_it_is_said_to_be_tied(
    family: str, differs: bool, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    tied = save_decoder(source, family, tie_word_embeddings=True)
    weights = safetensors.torch.load_file(source / "model.safetensors")
    head = tied.get_output_embeddings().weight.detach().double()  # another type than the table's
    weights["lm_head.weight"] = head.flip(0).contiguous() if differs else head
    safetensors.torch.save_file(weights, source / "model.safetensors", {"format": "pt"})
    twin = AutoModelForCausalLM.from_pretrained(source).eval()

    import_checkpoint(source, tmp_path / "checkpoint")

    model = load_checkpoint(tmp_path / "checkpoint").model
    ids = torch.randint(0, VOCAB_SIZE, (3, model.config.max_target_len))
    torch.testing.assert_close(model(ids), twin(ids).logits, rtol=0, atol=5e-5)
    assert model.config.tie_output is not differs


@torch.no_grad()
def test_a_shorter_model_is_the_beginning_of_the_longer_one(tmp_path: Path) -> None:
    twin = save_decoder(tmp_path / "source", "llama", rope_parameters=YARN)

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint", max_len=9)

    model = load_checkpoint(tmp_path / "checkpoint").model
    assert model.config.max_target_len == 9
    ids = torch.randint(0, VOCAB_SIZE, (3, 9))
    torch.testing.assert_close(model(ids), twin(ids).logits, rtol=0, atol=5e-5)


@torch.no_grad()
def test_longrope_beyond_its_first_length_is_imported_where_it_is_asked_for(tmp_path: Path) -> None:
    options = {"rope_parameters": LONG, "original_max_position_embeddings": 16}
    twin = save_decoder(tmp_path / "source", "phi3", **options)

    for asked, places in ((None, 16), (16, 16), (20, 20), (99, MAX_LEN)):
        out = tmp_path / f"checkpoint {asked}"
        notes = import_checkpoint(tmp_path / "source", out, max_len=asked).notes

        model = load_checkpoint(out).model
        assert model.config.max_target_len == places
        longer = range(17, places + 1) if places > 16 else range(1, 17)
        for length in longer:  # transformers takes other factors from 17 on
            ids = torch.randint(0, VOCAB_SIZE, (2, length))
            torch.testing.assert_close(model(ids), twin(ids).logits, rtol=0, atol=5e-5)
        told = "above 16 imports it for long texts" if places == 16 else "of more than 16 tokens"
        assert told in notes[0]
        assert notes[1:] == (() if asked != 99 else (NO_LONGER,))


@pytest.mark.long
async def test_a_longrope_for_long_texts_writes_as_hugging_face_behind_long_prompts(
    tmp_path: Path,
) -> None:
    options = {"rope_parameters": LONG, "original_max_position_embeddings": 16}
    twin = save_decoder(tmp_path / "source", "phi3", max_position_embeddings=40, **options)

    await check_greedy_tokens(tmp_path, twin, num_tokens=15, lengths=(17, 18, 24), max_len=40)


@pytest.mark.parametrize(
    ("name", "learned"), [("opt", MAX_LEN), ("bert", 14), ("roberta", 12), ("bart", 16)]
)
@torch.no_grad()
def test_of_learned_positions_the_first_are_left(name: str, learned: int, tmp_path: Path) -> None:
    source = tmp_path / "source"
    if name == "bart":
        twin = save_translation(name, source)
    elif name == "opt":
        twin = save_decoder(source, name)
    else:
        twin = save_encoder(source, name, "classify")
    ids = torch.randint(4, 20, (2, 9))

    whole = import_checkpoint(source, tmp_path / "whole", max_len=99).notes
    notes = import_checkpoint(source, tmp_path / "checkpoint", max_len=9).notes
    model = load_checkpoint(tmp_path / "checkpoint").model

    has_encoder = model.config.num_encoder_layers > 0
    has_both = has_encoder and model.config.num_decoder_layers > 0
    targets = {"decoder_input_ids": ids} if has_both else {}
    expected = twin(ids, **targets).logits
    ours = model(ids, ids) if has_both else model(ids)
    found = ours[0] if has_encoder and not has_both else ours
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
    assert max(model.config.max_source_len, model.config.max_target_len) == 9
    assert f"texts may have {learned} tokens, not the 99 of --max-len: the model" in str(whole)
    assert "--max-len" not in str(notes)


# They have most of what decoders differ in.
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox"])
async def test_greedy_tokens_of_the_package_are_those_of_hugging_face(
    family: str, tmp_path: Path
) -> None:
    twin = save_decoder(tmp_path / "source", family)

    await check_greedy_tokens(tmp_path, twin, num_tokens=15, lengths=(1, 3, 8, 8))


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in DECODERS),
        ("opt", OPT_350M),
        ("llama", {"rope_parameters": LLAMA3, "eos_token_id": [25, 7, 11]}),
        ("llama", {"vocab_size": VOCAB_SIZE + 11, "tie_word_embeddings": True}),  # padded
    ],
)
async def test_64_greedy_tokens_behind_8_prompts_are_those_of_hugging_face(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    twin = save_decoder(tmp_path / "source", family, max_position_embeddings=80, **options)

    await check_greedy_tokens(tmp_path, twin, num_tokens=64)
