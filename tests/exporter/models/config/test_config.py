"""A configuration is refused with all wrong fields, else with all that do not go together."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from exporter.models import TransformerConfig
from exporter.models.config import AttentionConfig

GPT: dict[str, Any] = {
    "architecture": "decoder",
    "d_model": 16,
    "num_heads": 2,
    "d_ff": 8,
    "num_decoder_layers": 1,
}


def test_all_options_that_do_not_go_together_are_told_at_once() -> None:
    wrong = {
        "num_encoder_layers": 1,
        "num_kv_heads": 3,
        "pad_token_id": 1,
        "attention.score": "additive",
        "attention.windowed_layers": (0,),
        "positions.kind": "rotary",
        "positions.offset": 2,
    }

    with pytest.raises(ValidationError) as refused:
        TransformerConfig.of({**GPT, **wrong})

    (problem,) = refused.value.errors()
    assert problem["msg"] == "Value error, " + "; ".join(
        [
            "decoder needs vocab_size",
            "decoder needs max_target_len",
            "attention.windowed_layers needs attention.window",
            "decoder has no encoder layers and decoder layers, got num_encoder_layers 1 and "
            "num_decoder_layers 1",
            "num_heads (2) must be a multiple of num_kv_heads (3)",
            "additive scores and the relu normaliser are for encoder and vision-encoder",
            "positions.offset needs sinusoidal positions, got rotary",
            "rotary positions need heads whose key_dim is a multiple of 16 and at least value_dim, "
            "got 8 and 8",
        ]
    )


def test_all_wrong_fields_are_told_at_once_before_what_does_not_go_together() -> None:
    wrong = {
        "d_model": None,
        "dropout": "0.1",  # text
        "num_heads": True,
        "unknown": 1,
        "num_kv_heads": 3,
        "attention.biases": True,
        "positions.rotary_scaling": {"factor": 2.0},
        "image": {"size": 9, "patch_size": 2, "mean": (0.5,)},
    }

    with pytest.raises(ValidationError) as refused:
        TransformerConfig.of({**GPT, **wrong})

    told = {".".join(map(str, one["loc"][:2])): one["msg"] for one in refused.value.errors()}
    assert {*told} == {
        *("d_model", "dropout", "num_heads", "unknown", "attention.biases"),
        *("positions.rotary_scaling", "image"),
    }
    assert told["image"] == (
        "Value error, size (9) must be a multiple of patch_size; "
        "mean and std need one value for each of 3 channels"
    )


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            {"attention.window": 3, "attention.windowed_layers": (-1, 0, 7)},
            "attention.windowed_layers has -1, 7; the layers are 0 to 0",
        ),
        ({"labels": ("a", "b")}, "labels is for encoder and vision-encoder, got decoder"),
        ({"num_token_types": 2}, "num_token_types is for encoder, got decoder"),
        ({"head.pooler": "tanh"}, "head.pooler (tanh) is for encoder, got decoder"),
        (
            {"image": {"size": 8, "patch_size": 2, "mean": (0.5,) * 3, "std": (0.5,) * 3}},
            "image is for vision-encoder, got decoder",
        ),
    ],
)
def test_options_that_change_nothing_are_refused(wrong: dict[str, Any], told: str) -> None:
    sizes = {"vocab_size": 9, "max_target_len": 4}

    with pytest.raises(ValidationError) as refused:
        TransformerConfig.of({**GPT, **sizes, "positions.kind": "learned", **wrong})

    (problem,) = refused.value.errors()
    assert problem["msg"] == f"Value error, {told}"


def test_options_are_changed_by_their_paths() -> None:
    sizes = {"vocab_size": 9, "max_target_len": 4}
    config = TransformerConfig.of({**GPT, **sizes, "attention.bias": False, "attention.window": 3})

    changed = config.changed({"attention.window": 2, "dropout": 0.5})

    assert changed.attention == AttentionConfig(bias=False, window=2)
    assert (changed.dropout, changed.vocab_size) == (0.5, 9)
    with pytest.raises(ValidationError, match="attention.window is for decoder and encoder, got e"):
        config.changed({"architecture": "encoder-decoder"})
