"""An imported model writes what its original does with its own options, greedily and by beams."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from engine.errors import CertificateError, CheckpointError
from exporter.checkpoint import load_checkpoint, read_config
from exporter.compare.original import compare_with_original
from exporter.compare.original_answers import NUM_PROMPTS, Answers, Search
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface import translation_sources
from tests.exporter.huggingface.sources import edit_json, save_gpt2, save_marian

SAVE: dict[str, Callable[..., Any]] = {
    "gpt2": save_gpt2,
    "marian": save_marian,
    "bart": lambda path, **options: translation_sources.save("bart", path, **options),
}


def save_with(family: str, path: Path, **generation: Any) -> None:
    """Save a model with these options of generation."""
    SAVE[family](path)
    edit_json(path / "generation_config.json", **generation)


OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "repetition penalty": ("gpt2", {"repetition_penalty": 3.0}, {"repetition_penalty": None}),
    "n-grams that come twice": ("bart", {"no_repeat_ngram_size": 2}, {"no_repeat_ngram": None}),
    "a token never written": ("marian", {}, {"banned_tokens": ()}),
    "the first token": ("bart", {"forced_bos_token_id": 7}, {"forced_begin": ()}),
    "the fewest tokens": ("marian", {"min_new_tokens": 15}, {"min_new_tokens": None}),
    "number of beams": ("marian", {"num_beams": 3}, {"beam": 2}),
    "length of beams": ("marian", {"length_penalty": -2.0}, {"length_penalty": 1.0}),
}


SOON = {"repetition penalty", "a token never written", "number of beams"}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in SOON else pytest.mark.long) for one in OPTIONS]
)
def test_an_option_of_generation_that_is_lost_is_found(name: str, tmp_path: Path) -> None:
    family, given, changed = OPTIONS[name]
    save_with(family, tmp_path / "original", **given)
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")
    described = read_config(tmp_path / "checkpoint")
    lost = described.model_copy(
        update={"generation": described.generation.model_copy(update=changed)}
    )
    kind = AutoModelForCausalLM if family == "gpt2" else AutoModelForSeq2SeqLM
    original = kind.from_pretrained(tmp_path / "original").eval()
    model = load_checkpoint(tmp_path / "checkpoint").model

    right, wrong = (Search.of(one) for one in (described, lost))
    assert right is not None and wrong is not None
    theirs = right.theirs(original)

    beams = f"8 of 8 prompts by {given.get('num_beams', 2)} beams"
    assert right.compare(model, theirs, lambda: original) == ["8 of 8 prompts greedy", beams]
    with pytest.raises(
        CertificateError, match=r"it writes other tokens than `generate`, .*, there"
    ):
        wrong.compare(model, theirs, lambda: original)


def test_an_import_that_writes_other_tokens_is_refused(tmp_path: Path) -> None:
    original, checkpoint = tmp_path / "original", tmp_path / "checkpoint"
    save_with("gpt2", original, repetition_penalty=3.0)
    import_checkpoint(original, checkpoint)
    edit_json(checkpoint / "config.json", generation={})

    with pytest.raises(CheckpointError, match="report it with generation_config.json, or import"):
        compare_with_original(original, checkpoint)


@pytest.mark.parametrize(
    "given",
    [
        {"eos_token_id": None},  # which config.json says
        {"eos_token_id": []},
        {"eos_token_id": [28, 5, 28]},
        {"exponential_decay_length_penalty": [1, 9.0], "sequence_bias": [[[5], 30.0]]},
        {"stop_strings": ["w1"]},
        {"prompt_lookup_num_tokens": 3, "low_memory": True},
    ],
)
def test_options_that_an_import_leaves_are_left_in_the_original(
    given: dict[str, Any], tmp_path: Path
) -> None:
    save_with("gpt2", tmp_path / "original", **given)
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")

    said = compare_with_original(tmp_path / "original", tmp_path / "checkpoint").said

    assert said.endswith("8 of 8 prompts greedy, 8 of 8 prompts by 2 beams")


def test_a_model_with_no_room_to_write_is_compared_without_its_writing(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "original", n_positions=1)
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")

    said = compare_with_original(tmp_path / "original", tmp_path / "checkpoint").said

    assert "4 inputs within" in said and said.endswith("92 texts, 20 options")


def test_where_generate_fails_logits_are_compared_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise ValueError("contrastive search is elsewhere now")

    save_gpt2(tmp_path / "original")
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")
    monkeypatch.setattr(Search, "theirs", fail)

    found = compare_with_original(tmp_path / "original", tmp_path / "checkpoint")

    assert "inputs within" in found.said and "prompts" not in found.said
    assert "of its original, for contrastive search is elsewhere now" in found.notes[-1]


def test_other_ends_of_texts_are_found_where_no_text_has_them(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "original")
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")
    described = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    edit_json(
        tmp_path / "checkpoint" / "config.json",
        model={**described["model"], "other_eos_token_ids": [5]},
    )

    with pytest.raises(CheckpointError, match=r"eos_token_id is \[5, 28\], there \[28\]"):
        compare_with_original(tmp_path / "original", tmp_path / "checkpoint")


def test_a_prompt_does_not_count_whose_tokens_the_original_itself_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_gpt2(tmp_path / "original")
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")
    search = Search.of(read_config(tmp_path / "checkpoint"))
    model = load_checkpoint(tmp_path / "checkpoint").model
    assert search is not None
    prompts = [(i, 5, 9, 2) for i in range(NUM_PROMPTS)]
    right = search._ours(model, prompts, [(1,)] * NUM_PROMPTS, 1)
    turned = count()
    monkeypatch.setattr(Search, "_generated", lambda *given: [(next(turned),)])

    def compare(num_others: int) -> list[str]:
        theirs = [(0, 0)] * num_others + right[num_others:]
        return search.compare(
            model,
            Answers(prompts, {1: theirs}),
            lambda: None,
        )

    assert compare(0) == ["8 of 8 prompts greedy"]
    assert compare(4) == ["4 of 8 prompts greedy"]
    with pytest.raises(CheckpointError, match="^3 of 8 prompts can be .*: .*; look for weights"):
        compare(5)
