"""The families that are held against transformers at their published shapes."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from exporter.compare.original import NOT_COMPARED
from exporter.huggingface import FAMILIES, Imported
from exporter.imports import import_model
from loadtest.lab.peers import families
from loadtest.lab.peers.families import measure, problems
from loadtest.lab.peers.family_shapes import PLAIN_DEIT, SHAPES, FamilyShape
from loadtest.lab.peers.family_twins import make_twin, num_parameters

RESULTS = Path(__file__).parents[2] / "loadtest" / "results"
GOOD: dict[str, Any] = {
    "prompts_equal": "8 of 8",
    "distinct_answers": 8,
    "original": "compared with GPT2LMHeadModel of transformers 5.23.0: 18 inputs",
}


def test_every_family_has_a_published_shape() -> None:
    types = {name for family in FAMILIES for name in family.model_types}

    assert {shape.model_type for shape in SHAPES.values()} == types


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("t5-small", 60_506_624),
        ("flan-t5-small", 76_961_152),
        ("byt5-small", 299_637_760),
        ("mt5-small", 300_176_768),
    ],
)
def test_a_shape_has_the_parameters_of_the_published_model(name: str, published: int) -> None:
    assert num_parameters(SHAPES[name]) == published


def test_a_line_that_holds_has_no_problems() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompts_equal": "7 of 8"}, "7 of 8 prompts equal"),
        ({"beams_equal": "0 of 8"}, "0 of 8 beams equal"),
        ({"distinct_answers": 1}, "1 answers differ, so equality shows nothing"),
        ({"original": f"{NOT_COMPARED}: no memory"}, "no memory"),
    ],
)
def test_a_line_that_does_not_hold_is_named(change: dict[str, Any], problem: str) -> None:
    (found,) = problems({**GOOD, **change})

    assert problem in found


def test_kept_lines_hold() -> None:
    kept = json.loads((RESULTS / "families.json").read_text())

    assert {name: problems(line) for name, line in kept["families"].items() if problems(line)} == {}
    assert {*kept["families"], *kept["not_measured"]} == {*SHAPES}


WRITER = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
T5 = {"vocab_size": 300, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
IMAGES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}


MEASURED = pytest.mark.parametrize(
    "shape",
    [
        FamilyShape("gpt_neox", WRITER, max_len=120),
        FamilyShape("t5", {**T5, "decoder_start_token_id": 0}, max_len=70),
        FamilyShape("bert", WRITER, max_len=None),
        FamilyShape("deit", {**IMAGES, **PLAIN_DEIT}, max_len=None),
    ],
    ids=lambda shape: shape.model_type,
)


@MEASURED
def test_a_family_is_compared_without_an_export(shape: FamilyShape, tmp_path: Path) -> None:
    line = measure(shape, tmp_path, proof=None)

    assert problems(line) == [] and line["exported"] is False
    assert not (tmp_path / "package").exists()


def test_the_original_is_in_memory_no_more_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    def make(shape: FamilyShape, out: Path) -> Any:
        twin = make_twin(shape, out)
        made.append(weakref.ref(twin))
        return twin

    def check_and_import(*args: Any) -> tuple[Imported, str]:
        assert made[0]() is None
        return import_model(*args)

    monkeypatch.setattr(families, "make_twin", make)
    monkeypatch.setattr(families, "import_model", check_and_import)

    measure(FamilyShape("bert", WRITER, max_len=None), tmp_path, proof=None)


@pytest.mark.long
@MEASURED
def test_a_family_is_measured_whatever_its_size(shape: FamilyShape, tmp_path: Path) -> None:
    assert problems(measure(shape, tmp_path, "quick")) == []
