"""Decoders of every family compute what Hugging Face computes, as they are and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exporter.checkpoint import load_checkpoint
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.decoders import DECODERS, VARIANTS, save_decoder
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


SHORT = ("gemma3_text", "gpt_neox")  # they have most of what decoders differ in


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in SHORT else pytest.mark.long)
        for name in DECODERS
        if name != "llama"
    ],
)
async def test_greedy_tokens_of_the_package_are_those_of_hugging_face(
    family: str, tmp_path: Path
) -> None:
    twin = save_decoder(tmp_path / "source", family)

    await check_greedy_tokens(tmp_path, twin, num_tokens=15, lengths=(1, 3, 8, 8))
