"""Every default of generation is held against the loaded original's; a wrong one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSeq2SeqLM, GenerationConfig

from engine.errors import CertificateError, CheckpointError
from engine.requests.generation_defaults import GenerationDefaults
from exporter.checkpoint import CheckpointConfig, read_config
from exporter.compare.original import compare_with_original
from exporter.compare.original_options import compare_options
from exporter.huggingface import import_checkpoint
from exporter.huggingface.generation import NEUTRAL
from tests.exporter.huggingface.sources import EOS, PAD, edit_json, save_gpt2, save_marian

GIVEN: dict[str, Any] = {
    "num_beams": 4,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.8,
    "length_penalty": 2.0,
    "early_stopping": True,
    "renormalize_logits": True,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[PAD], [8, 9], [EOS]],
    "suppress_tokens": [3, 4],
    "begin_suppress_tokens": [1, 2],
    "forced_bos_token_id": 7,
    "forced_eos_token_id": EOS,
    "max_length": 12,
    "min_length": 5,
}
# By our name: another value, and the name in `generate`. Each is dropped, too.
OTHERS: dict[str, tuple[Any, str]] = {
    "strategy": ("sampling", "num_beams"),
    "temperature": (0.8, "temperature"),
    "top_k": (21, "top_k"),
    "top_p": (0.8, "top_p"),
    "min_p": (0.2, "min_p"),
    "typical_p": (0.9, "typical_p"),
    "beam": (3, "num_beams"),
    "length_penalty": (1.0, "length_penalty"),
    "length_penalty_form": ("paper", "length_penalty"),
    "beam_end": ("bound", "early_stopping"),
    "renormalize": (False, "renormalize_logits"),
    "repetition_penalty": (1.2, "repetition_penalty"),
    "no_repeat_ngram": (4, "no_repeat_ngram_size"),
    "encoder_no_repeat_ngram": (3, "encoder_no_repeat_ngram_size"),
    "banned_tokens": ((3, 4), "bad_words_ids"),
    "banned_sequences": (((8, 10),), "bad_words_ids"),
    "begin_banned_tokens": ((1,), "begin_suppress_tokens"),
    "forced_begin": ((8,), "forced_bos_token_id"),
    "forced_end": (9, "forced_eos_token_id"),
    "max_new_tokens": (12, "max_length"),
    "min_new_tokens": (5, "min_length"),
}
# Options that choose no other token, or another way to the same ones.
WITHOUT_EFFECT = {
    *("bos_token_id", "pad_token_id", "remove_invalid_values", "low_memory", "use_mtp"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "compile_config", "disable_compile", "continuous_batching_config"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "speculation_type"),
    *("assistant_ensemble_weight", "transformers_version"),
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[CheckpointConfig, Any]:
    """Return what an import has of a model with many options, and those of its loaded original."""
    path = tmp_path_factory.mktemp("options")
    save_marian(path / "original")
    edit_json(path / "original" / "generation_config.json", **GIVEN)
    import_checkpoint(path / "original", path / "checkpoint")
    original = AutoModelForSeq2SeqLM.from_pretrained(path / "original")
    return read_config(path / "checkpoint"), original.generation_config


def test_every_option_is_compared(imported: tuple[CheckpointConfig, Any]) -> None:
    described, generation = imported
    empty = GenerationConfig()

    named = {*GIVEN, "do_sample", "eos_token_id", "decoder_start_token_id"}
    named |= {"max_new_tokens", "min_new_tokens"}

    assert compare_options(described, generation) == 21
    assert {*vars(empty)} - {*NEUTRAL} - WITHOUT_EFFECT - {"_from_model_config"} == named
    assert {*OTHERS} == {*GenerationDefaults.model_fields}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *((name, other) for name, (other, _) in OTHERS.items()),
        *((name, None) for name in OTHERS if name != "length_penalty_form"),  # which is not said
    ],
)
def test_a_default_that_differs_is_named(
    name: str, other: Any, imported: tuple[CheckpointConfig, Any]
) -> None:
    described, generation = imported
    given = {n: v for n, v in {**described.generation.given, name: other}.items() if v is not None}
    wrong = described.model_copy(update={"generation": GenerationDefaults(**given)})

    with pytest.raises(CertificateError, match=f"other defaults .*{OTHERS[name][1]}.* is .* there"):
        compare_options(wrong, generation)


@pytest.mark.parametrize(
    ("given", "changed", "message"),
    [
        ({"do_sample": True}, {"strategy": "greedy"}, "do_sample is False, there True"),
        ({"do_sample": True}, {"top_k": 0}, "top_k is 0, there 37"),
        ({"max_new_tokens": 7}, {"max_new_tokens": 8}, "or max_length is 8, there 7"),
        ({"bad_words_ids": [[5], [6]]}, {"banned_tokens": [5]}, r"suppress_tokens is .*, there "),
    ],
)
def test_a_model_with_another_default_is_refused(
    given: dict[str, Any], changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_gpt2(tmp_path / "original")
    edit_json(tmp_path / "original" / "generation_config.json", **given)
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")
    described = read_config(tmp_path / "checkpoint")
    wrong = {**described.generation.model_dump(mode="json"), **changed}
    edit_json(tmp_path / "checkpoint" / "config.json", generation=wrong)

    with pytest.raises(CheckpointError, match=f"{message}.*report it with generation_config.json"):
        compare_with_original(tmp_path / "original", tmp_path / "checkpoint")
