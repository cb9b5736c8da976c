"""Imported encoder-decoders compute what Hugging Face computes, eager and under an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from engine.errors import CheckpointError
from exporter.checkpoint import load_checkpoint
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.greedy import check_tokens
from tests.exporter.huggingface.sources import EOS, VOCAB_SIZE, edit_json
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
    ("bart", {"own_output": True}),
    ("bart", {"encoder_layers": 1, "decoder_layers": 3, "scale_embedding": True}),
    ("mbart", {"activation_function": "relu", "decoder_layers": 1}),
    ("mbart", {"tie_word_embeddings": False}),  # a table for each side, and an output
    ("pegasus", {"tie_word_embeddings": False}),
    ("m2m_100", {"scale_embedding": False, "pad_token_id": 3}),
    ("pegasus", {"activation_function": "gelu_new", "max_position_embeddings": 20}),
    ("t5", {"tie_word_embeddings": False, "own_output": True}),
    ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "own_output": True}),
    ("t5", {"feed_forward_proj": "gated-silu", "num_decoder_layers": 1}),
    ("t5", {"num_decoder_layers": 3}),
    ("t5", {"own_output": True}),  # scaled, as older versions save it
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
    source_ids = torch.randint(source_size, (3, S))
    source_ids[:, 2] = twin.config.pad_token_id  # typed in a text: M2M-100 does not count it
    target_ids = torch.randint(4, target_size, (3, T))

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")
    logits = load_checkpoint(tmp_path / "checkpoint").model(source_ids, target_ids, MASK)

    expected = twin(source_ids, MASK.long(), target_ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_t5_may_have_its_table_under_the_name_of_the_decoder_alone(tmp_path: Path) -> None:
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "own_output": True}
    twin = save("t5", tmp_path / "source", **gated)
    path = tmp_path / "source" / "model.safetensors"
    weights = safetensors.torch.load_file(path)  # as MADLAD has them
    weights["decoder.embed_tokens.weight"] = weights.pop("shared.weight")
    safetensors.torch.save_file(weights, path)
    source_ids, target_ids = (
        torch.randint(4, VOCAB_SIZE, (3, S)),
        torch.randint(4, VOCAB_SIZE, (3, T)),
    )

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")
    logits = load_checkpoint(tmp_path / "checkpoint").model(source_ids, target_ids, MASK)

    expected = twin(source_ids, MASK.long(), target_ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_logits_of_a_file_in_half_precision_are_those_that_it_gives_in_float32(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    saved = save(family, tmp_path / "source")
    weights = {name: weight.to(dtype).clone() for name, weight in saved.state_dict().items()}
    safetensors.torch.save_file(
        weights, tmp_path / "source" / "model.safetensors", {"format": "pt"}
    )
    twin = type(saved).from_pretrained(tmp_path / "source", dtype=torch.float32)
    source_ids = torch.randint(4, VOCAB_SIZE, (3, S))
    target_ids = torch.randint(4, VOCAB_SIZE, (3, T))

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")
    logits = load_checkpoint(tmp_path / "checkpoint").model(source_ids, target_ids, MASK)

    expected = twin.eval()(source_ids, MASK.long(), target_ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["bart", "mbart", "m2m_100", "pegasus", "marian"])
@torch.no_grad()
def test_a_file_of_the_body_alone_is_read_as_that_of_bart_base_is(
    family: str, tmp_path: Path
) -> None:
    twin = save(family, tmp_path / "source")
    getattr(twin, "final_logits_bias", torch.zeros(1)).zero_()  # which the body has not
    path = tmp_path / "source" / "model.safetensors"
    weights = {f"{side}.version": torch.tensor([3.0]) for side in ("encoder", "decoder")}
    for name, weight in safetensors.torch.load_file(path).items():
        if name != "final_logits_bias":
            weights[name.removeprefix("model.")] = weight
    safetensors.torch.save_file(weights, path)
    edit_json(tmp_path / "source" / "config.json", architectures=[type(twin.model).__name__])
    source_ids = torch.randint(4, VOCAB_SIZE, (3, S))
    target_ids = torch.randint(4, VOCAB_SIZE, (3, T))

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")
    logits = load_checkpoint(tmp_path / "checkpoint").model(source_ids, target_ids, MASK)

    expected = twin(source_ids, MASK.long(), target_ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_an_mbart_that_does_not_say_what_outputs_begin_behind_is_imported(tmp_path: Path) -> None:
    save("mbart", tmp_path / "source", decoder_start_token_id=None)

    imported = import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    assert "outputs begin behind the end token" in imported.notes[0]
    assert load_checkpoint(tmp_path / "checkpoint").config.model.bos_token_id == EOS


def test_a_byt5_may_name_its_tokenizer_in_config_json_alone(tmp_path: Path) -> None:
    save("t5", tmp_path / "source", vocab_size=384)
    edit_json(tmp_path / "source" / "config.json", tokenizer_class="ByT5Tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "source" / name).unlink()

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    tokenizer = load_checkpoint(tmp_path / "checkpoint").tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("hé").ids == [104 + 3, 0xC3 + 3, 0xA9 + 3, 1]


@pytest.mark.parametrize(("max_len", "limit"), [(None, 512), (9, 9), (700, 700)])
def test_a_model_that_knows_distances_only_is_as_long_as_it_is_told(
    max_len: int | None, limit: int, tmp_path: Path
) -> None:
    save("t5", tmp_path / "source")

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint", max_len=max_len)

    config = load_checkpoint(tmp_path / "checkpoint").config.model
    assert (config.max_source_len, config.max_target_len) == (limit, limit)


def test_a_length_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    save("t5", tmp_path / "source")

    with pytest.raises(CheckpointError, match="max_source_len: Input should be less"):
        import_checkpoint(tmp_path / "source", tmp_path / "checkpoint", max_len=2**21)


OWN = {"own_output": True}  # a random model with one embedding repeats itself
SHORT = {"n_positions": 16}
FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "own_output": True}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(
            "bart",
            {**OWN, "forced_bos_token_id": 7, "forced_eos_token_id": EOS},
            marks=pytest.mark.long,
        ),
        pytest.param("m2m_100", OWN, marks=pytest.mark.long),
        ("t5", {**SHORT, **FLAN}),
    ],
)
async def test_the_package_writes_what_hugging_face_writes(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    twin = save(family, tmp_path / "source", **options)

    await check_tokens(tmp_path, twin, searches(11), lengths=(1, 4, 7))


LONG: dict[str, Any] = {**OWN, "vocab_size": 101, "max_position_embeddings": 80}
FORCED = {"forced_bos_token_id": 7, "forced_eos_token_id": EOS}
LONG_T5: dict[str, Any] = {"vocab_size": 101, "n_positions": 80}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, LONG) for family in ("bart", "pegasus", "marian")),
        *((family, {**LONG, **FORCED}) for family in ("bart", "mbart", "m2m_100")),
        (
            "marian",
            {**LONG, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 90},
        ),
        ("t5", LONG_T5),
        ("t5", {**LONG_T5, **FLAN}),  # and MADLAD
        ("t5", {**LONG_T5, **FLAN, "num_decoder_layers": 1}),  # ByT5
        ("mbart", {**LONG, "own_output": False, "tie_word_embeddings": False}),
        ("mt5", {**LONG_T5, **OWN}),
    ],
)
async def test_the_package_writes_long_answers_as_hugging_face_does(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    twin = save(family, tmp_path / "source", **options)

    await check_tokens(tmp_path, twin, searches(64), lengths=(1, 2, 5, 9, 17, 30, 51, 80))


def searches(num_tokens: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Greedy search and one of 4 beams, all else as the source has it; ours and theirs."""
    theirs = {"do_sample": False, "max_new_tokens": num_tokens}
    return [
        ({"strategy": "greedy", "max_new_tokens": num_tokens}, {**theirs, "num_beams": 1}),
        (
            {"strategy": "beam", "beam_width": 4, "max_new_tokens": num_tokens},
            {**theirs, "num_beams": 4},
        ),
    ]
