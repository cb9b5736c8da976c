"""The families that are held against transformers at their published shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from exporter.huggingface import FAMILIES
from loadtest.peers.families import measure
from loadtest.peers.family_shapes import SHAPES, FamilyShape

GENERATING = [n for f in FAMILIES if "generate" in f.abilities for n in f.model_types]


def test_every_decoder_has_a_published_shape() -> None:
    decoders = {n for n in GENERATING if not AutoConfig.for_model(n).is_encoder_decoder}

    assert decoders <= {shape.model_type for shape in SHAPES.values()} <= set(GENERATING)


@pytest.mark.long
def test_a_family_is_measured_whatever_its_size(tmp_path: Path) -> None:
    tiny = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }

    found = measure(FamilyShape("gpt_neox", tiny, max_len=120), tmp_path)

    assert found["prompts_equal"] == "8 of 8"
    assert float(str(found["largest_logit_difference_eager"])) < 1e-4
