"""A package does by default what an original says of generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.requests.defaults import sampling_params
from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.request import SamplingParams
from exporter.checkpoint import load_checkpoint
from exporter.graphs.contracts import contract_of
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.greedy import check_tokens
from tests.exporter.huggingface.sources import EOS, PAD, edit_json, save_gpt2, save_marian

OF_TRANSFORMERS = {"length_penalty": 1.0, "beam_end": "estimate"}  # unless an original says more


def imported(save: Any, path: Path, **options: Any) -> tuple[GenerationDefaults, tuple[str, ...]]:
    """Import a model with these generation options; return its defaults, and the notes."""
    save(path / "source")
    edit_json(path / "source" / "generation_config.json", **options)
    notes = import_checkpoint(path / "source", path / "checkpoint").notes
    return load_checkpoint(path / "checkpoint").config.generation, notes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        (
            {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
            {"strategy": "beam", "beam": 4, "length_penalty": 2.0, "beam_end": "enough"},
        ),
        (
            {"length_penalty": -0.5, "early_stopping": "never"},
            {"length_penalty": -0.5} | {"beam_end": "bound"},
        ),
        ({"do_sample": True}, {"strategy": "sampling", "top_k": 37}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
            {"strategy": "sampling", "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
        ),
        ({"do_sample": True, "top_k": 0, "temperature": 1.0}, {"strategy": "sampling"}),
        ({"do_sample": False, "temperature": 0.0}, {}),
        (
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
            {"repetition_penalty": 1.2, "no_repeat_ngram": 3},
        ),
        (
            {"bad_words_ids": [[7], [8, 9], [EOS]], "suppress_tokens": [3]},
            {"banned_tokens": (3, 7), "banned_sequences": ((8, 9),)},
        ),
        (
            {
                "forced_bos_token_id": 5,
                "forced_eos_token_id": [EOS, 9],
                "begin_suppress_tokens": [1, 2],
            },
            {"forced_begin": (5,), "forced_end": 9, "begin_banned_tokens": (1, 2)},
        ),
        ({"renormalize_logits": True}, {"renormalize": True}),
        ({"renormalize_logits": False}, {}),
        # These count the start token.
        ({"max_length": 9, "min_length": 4}, {"max_new_tokens": 8, "min_new_tokens": 3}),
        ({"max_length": 9, "max_new_tokens": 5, "min_length": 1}, {"max_new_tokens": 5}),
    ],
)
def test_options_are_taken_over(
    options: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    wanted = {**OF_TRANSFORMERS, "banned_tokens": (PAD,), **expected}

    defaults, notes = imported(save_marian, tmp_path, **options)

    assert defaults.given == wanted
    assert notes == ()


def test_options_are_read_from_an_old_config(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").unlink()
    edit_json(tmp_path / "source" / "config.json", bad_words_ids=[[7], [8, 9], [28]], num_beams=2)

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    assert load_checkpoint(tmp_path / "checkpoint").config.generation.given == {
        **OF_TRANSFORMERS,
        "strategy": "beam",
        "beam": 2,
        "banned_tokens": (7,),
        "banned_sequences": ((8, 9),),
    }


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"max_length": 9}, "max_length 9, which counts the prompt,"),
        ({"min_length": 9}, "min_length 9, which counts the prompt,"),
        ({"forced_bos_token_id": 9}, "forced_bos_token_id 9"),
        ({"do_sample": True, "num_beams": 2}, "do_sample beside num_beams"),
        ({"guidance_scale": 1.5}, "guidance_scale 1.5"),
        ({"num_return_sequences": 3, "do_sample": True}, "num_return_sequences 3"),
        ({"force_words_ids": [[5]]}, "force_words_ids [[5]]"),
        ({"watermarking_config": {"bias": 2.5}}, "watermarking_config {'bias': 2.5}"),
        ({"token_healing": True, "use_cache": False}, "token_healing True"),
    ],
)
def test_options_that_are_not_taken_over_are_named(
    options: dict[str, Any], note: str, tmp_path: Path
) -> None:
    _, notes = imported(save_gpt2, tmp_path, **options)

    assert notes == (f"generation option {note} is not taken over",)


@pytest.mark.parametrize("tokens", [list(range(100_000)), ["a"] * 100_000])
def test_however_many_options_are_wrong_one_line_names_them(
    tokens: list[Any], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="(suppress|banned)_tokens") as caught:
        imported(save_gpt2, tmp_path, suppress_tokens=tokens)

    assert len(str(caught.value)) < 4_000  # 32 are named, and how many more there are
    assert "\n" not in str(caught.value)


def test_all_tokens_that_end_a_sequence_are_in_the_contract(tmp_path: Path) -> None:
    imported(save_gpt2, tmp_path, eos_token_id=[28, 5, 9, 5])

    config = load_checkpoint(tmp_path / "checkpoint").config.model

    assert (config.eos_token_id, config.other_eos_token_ids) == (28, (5, 9))
    contract = contract_of(config).generation
    assert contract is not None and contract.eos_token_ids == (28, 5, 9)


def test_an_id_below_zero_is_that_of_no_token(tmp_path: Path) -> None:
    imported(save_gpt2, tmp_path, pad_token_id=-1, eos_token_id=-1)

    config = load_checkpoint(tmp_path / "checkpoint").config.model

    assert (config.pad_token_id, config.eos_token_id) == (0, None)


def test_defaults_reach_a_request_that_says_nothing(tmp_path: Path) -> None:
    defaults, _ = imported(save_gpt2, tmp_path, num_beams=3)

    assert sampling_params({}, defaults) == SamplingParams(
        "beam", beam_width=3, length_penalty=1.0, beam_end="estimate"
    )


OWN: dict[str, dict[str, Any]] = {
    "gpt2": {
        "num_beams": 4,
        "eos_token_id": [28, 5, 9],
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[i, j] for i in range(0, 37, 3) for j in range(0, 37, 2)],
        "max_new_tokens": 10,
    },
    "marian": {
        "num_beams": 4,
        "length_penalty": 2.0,
        "early_stopping": True,
        "forced_bos_token_id": 7,
        "forced_eos_token_id": EOS,
        "encoder_no_repeat_ngram_size": 2,
        "repetition_penalty": 1.3,
        "suppress_tokens": [3, 4],
        "begin_suppress_tokens": list(range(20)),
        "bad_words_ids": [[PAD], *([i, j] for i in range(0, 36, 3) for j in range(0, 36, 2))],
        "max_length": 12,
        "min_length": 5,
    },
    "opus-mt": {  # as generation_config.json of these models has it
        "num_beams": 4,
        "bad_words_ids": [[PAD]],
        "forced_eos_token_id": EOS,
        "renormalize_logits": True,
        "max_length": 12,
    },
}


SEARCHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"strategy": "greedy"}, {"num_beams": 1}),
    (
        {"beam_width": 3, "length_penalty": -1.0, "beam_end": "bound", "max_new_tokens": 7},
        {"num_beams": 3, "length_penalty": -1.0, "early_stopping": "never", "max_new_tokens": 7},
    ),
]


@pytest.mark.parametrize(
    "family", ["gpt2", "marian", pytest.param("opus-mt", marks=pytest.mark.long)]
)
async def test_a_package_does_what_generate_does_unless_a_request_says_otherwise(
    family: str, tmp_path: Path
) -> None:
    save: Any = save_gpt2 if family == "gpt2" else save_marian
    twin: Any = save(tmp_path / "source")
    twin.generation_config.update(**OWN[family])
    twin.generation_config.save_pretrained(tmp_path / "source")

    answers = await check_tokens(tmp_path, twin, SEARCHES)

    assert len({len(answer) for answer in answers}) > 2, "hardly an answer ends by itself"


def test_what_is_set_for_one_task_is_named_in_one_note(tmp_path: Path) -> None:
    save_marian(tmp_path / "source")
    tasks = {
        "summarization": {"prefix": "summarize: ", "num_beams": 4},
        "translation_en_to_de": {"prefix": "translate English to German: "},
        "nothing": {"prefix": ""},
    }
    edit_json(tmp_path / "source" / "config.json", task_specific_params=tasks, prefix="x ")
    edit_json(tmp_path / "source" / "generation_config.json", prefix="y ")

    notes = import_checkpoint(tmp_path / "source", tmp_path / "checkpoint").notes

    (note,) = [note for note in notes if "prefix" in note]
    assert note == (
        "not taken over, a prefix is yours to put in front of texts, and options of a task are "
        "yours to ask for: prefix 'x '; summarization: prefix 'summarize: ', num_beams 4; "
        "translation_en_to_de: prefix 'translate English to German: '; prefix 'y '"
    )


def test_no_note_is_made_of_no_task(tmp_path: Path) -> None:
    save_marian(tmp_path / "source")
    edit_json(tmp_path / "source" / "config.json", task_specific_params=None, prefix=None)

    notes = import_checkpoint(tmp_path / "source", tmp_path / "checkpoint").notes

    assert "prefix" not in str(notes)
