"""Decoders of every family compute what Hugging Face computes, as they are and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CheckpointError
from exporter.checkpoint import load_checkpoint
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.decoders import (
    DECODERS,
    LLAMA3,
    OPT_350M,
    VARIANTS,
    YARN,
    save_decoder,
)
from tests.exporter.huggingface.greedy import check_greedy_tokens
from tests.exporter.huggingface.sources import VOCAB_SIZE


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


@torch.no_grad()
def test_a_shorter_model_is_the_beginning_of_the_longer_one(tmp_path: Path) -> None:
    twin = save_decoder(tmp_path / "source", "llama", rope_parameters=YARN)

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint", max_len=9)

    model = load_checkpoint(tmp_path / "checkpoint").model
    assert model.config.max_target_len == 9
    ids = torch.randint(0, VOCAB_SIZE, (3, 9))
    torch.testing.assert_close(model(ids), twin(ids).logits, rtol=0, atol=5e-5)


def test_learned_positions_are_not_cut(tmp_path: Path) -> None:
    save_decoder(tmp_path / "source", "opt")

    with pytest.raises(CheckpointError, match="max_len is 9, and this model has learned its 24"):
        import_checkpoint(tmp_path / "source", tmp_path / "checkpoint", max_len=9)


# They have most of what decoders differ in.
@pytest.mark.parametrize(
    ("family", "options"), [("gemma3_text", {}), ("gpt_neox", {}), ("opt", OPT_350M)]
)
async def test_greedy_tokens_of_the_package_are_those_of_hugging_face(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    twin = save_decoder(tmp_path / "source", family, **options)

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
