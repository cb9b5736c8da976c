"""Options that do not go together are told at once."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from exporter.models import TransformerConfig

GPT = {"family": "gpt", "d_model": 16, "num_heads": 2, "d_ff": 8, "num_decoder_layers": 1}


def test_problems_of_all_groups_are_told_at_once() -> None:
    wrong = {"positions": "rotary", "num_encoder_layers": 1, "attention_score": "additive"}

    with pytest.raises(ValidationError) as refused:
        TransformerConfig.model_validate({**GPT, **wrong, "num_kv_heads": 3, "pad_token_id": 1})

    (problem,) = refused.value.errors()
    for part in (
        "gpt has no encoder layers and decoder layers, got num_encoder_layers 1",
        "gpt needs vocab_size",
        "gpt needs max_target_len",
        "additive scores and the relu normaliser are for encoder-only families",
        r"num_heads (2) must be a multiple of num_kv_heads (3)",
        "rotary positions need heads whose key_dim is a multiple of 16",
    ):
        assert part in problem["msg"]


def test_a_wrong_field_hides_no_problem_of_a_group() -> None:
    learned = {"positions": "learned", "position_offset": 2, "position_dtype": "float16"}
    wrong = {"dropout": "much", "num_kv_heads": 3, **learned}

    with pytest.raises(ValidationError) as refused:
        TransformerConfig.model_validate(
            {**GPT, **wrong, "vocab_size": 3, "max_target_len": 4, "unknown": 1}
        )

    told = {problem["loc"]: problem["msg"] for problem in refused.value.errors()}
    assert set(told) == {("dropout",), ("unknown",), ()}
    assert "num_heads (2) must be a multiple of num_kv_heads (3)" in told[()]
    for name in ("position_offset", "position_dtype"):
        assert f"{name} needs sinusoidal positions, got learned" in told[()]


def test_what_reads_a_wrong_field_is_not_told_of_its_default() -> None:
    wrong = {"d_model": None, "num_decoder_layers": "two", "family": "gpt", "num_kv_heads": "2"}

    with pytest.raises(ValidationError) as refused:
        TransformerConfig.model_validate({**GPT, **wrong, "num_heads": 3, "pad_token_id": 1})

    told = {problem["loc"]: problem["msg"] for problem in refused.value.errors()}
    assert set(told) == {("d_model",), ("num_decoder_layers",), ()}
    assert told[()] == (
        "Value error, gpt needs vocab_size; gpt needs max_target_len; "
        "num_heads (3) must be a multiple of num_kv_heads (2)"
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"image": {"size": 9, "patch_size": 2, "mean": [0.5], "resample": "best"}},
            {
                ("image", "resample"): "Input should be",
                ("image",): "size (9) must be a multiple of patch_size; mean and std need one",
                (): "gpt needs vocab_size",
            },
        ),
        (
            {"positions": "rotary", "rotary_scaling": {"kind": "llama3", "factor": "x"}},
            {(): "rotary positions need heads whose key_dim is a multiple of 16"},
        ),
    ],
)
def test_wrong_fields_of_a_part_are_told_beside_its_problems_and_those_of_the_whole(
    given: dict[str, object], told: dict[tuple[str, ...], str]
) -> None:
    with pytest.raises(ValidationError) as refused:
        TransformerConfig.model_validate({**GPT, **given})

    found = {problem["loc"]: problem["msg"] for problem in refused.value.errors()}
    for place, message in told.items():
        assert message in found[place]


def test_problems_are_told_of_a_file_as_of_what_is_given() -> None:
    with pytest.raises(ValidationError) as refused:
        TransformerConfig.model_validate_json(
            '{"family": "gpt", "d_model": 16, "num_heads": 3, "d_ff": "x", "windowed_layers": [0]}'
        )

    told = {problem["loc"]: problem["msg"] for problem in refused.value.errors()}
    assert set(told) == {("d_ff",), ()}
    assert "d_model (16) must be a multiple of num_heads (3)" in told[()]
    assert "windowed_layers needs window" in told[()]
