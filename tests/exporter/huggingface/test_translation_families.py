"""Imported encoder-decoders compute what Hugging Face computes, eager and under an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exporter.checkpoint import load_checkpoint
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.sources import VOCAB_SIZE
from tests.exporter.huggingface.translation_sources import MODELS, save

S, T = 16, 15
MASK = torch.arange(S) < torch.tensor([S, 9, 1])[:, None]
DIFFERENCES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in MODELS),
    ("marian", {"share_encoder_decoder_embeddings": False}),
    (
        "marian",
        {"share_encoder_decoder_embeddings": False, "vocab_size": 50, "decoder_vocab_size": 37},
    ),
    (
        "marian",
        {
            "share_encoder_decoder_embeddings": False,
            "vocab_size": 37,
            "decoder_vocab_size": 45,
            "tie_word_embeddings": False,
        },
    ),
    ("bart", {"encoder_layers": 1, "decoder_layers": 3, "scale_embedding": True}),
    ("mbart", {"activation_function": "relu", "decoder_layers": 1}),
    ("m2m_100", {"scale_embedding": False, "pad_token_id": 3}),
    ("pegasus", {"activation_function": "gelu_new", "max_position_embeddings": 20}),
    ("t5", {"tie_word_embeddings": False, "own_output": True}),
    ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "own_output": True}),
    ("t5", {"feed_forward_proj": "gated-silu", "num_decoder_layers": 1}),
    ("t5", {"own_output": True}),  # of its own, and scaled, as older versions save it
    ("mt5", {"own_output": True}),
]


@pytest.mark.parametrize(("family", "options"), DIFFERENCES)
@torch.no_grad()
def test_logits_are_those_of_hugging_face(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    twin = save(family, tmp_path / "source", **options)
    source_size = options.get("vocab_size", VOCAB_SIZE)
    target_size = options.get("decoder_vocab_size", VOCAB_SIZE)
    source_ids = torch.randint(4, source_size, (3, S))
    target_ids = torch.randint(4, target_size, (3, T))

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")
    logits = load_checkpoint(tmp_path / "checkpoint").model(source_ids, target_ids, MASK)

    expected = twin(source_ids, MASK.long(), target_ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
