"""A tokenizer file that the library or the model cannot do with is refused, in bounded time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, processors

from engine.errors import PackageError
from engine.text.tokenizer import Tokenizer


@pytest.fixture
def content() -> dict[str, Any]:
    library = Library(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    library.add_special_tokens(["<s>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    return dict(json.loads(library.to_str()))


def _refusal(path: Path, content: object, vocab_size: int | None = None) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(PackageError) as caught:
        Tokenizer(path, vocab_size)
    return str(caught.value)


@pytest.mark.parametrize(
    "decoder",
    [
        ["Fuse"],
        {"type": "Sequence", "decoders": [["Fuse"]]},
        {"type": [], "prefix": "##", "cleanup": True},
        "Fuse",
        7,
    ],
)
def test_decoder_that_is_no_object_with_a_type_is_refused(
    tmp_path: Path, content: dict[str, Any], decoder: object
) -> None:
    found = _refusal(tmp_path / "tokenizer.json", content | {"decoder": decoder})

    assert "tokenizer.json is not a tokenizer of this model: its decoder: " in found


def test_special_tokens_that_are_not_there_are_refused(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    content["post_processor"]["special_tokens"] = {}  # on which the library panics, on any text

    assert "is not a tokenizer" in _refusal(tmp_path / "tokenizer.json", content)


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"a": 0}},
        {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {"a": 0},
        },
        {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]},
        {"type": "BPE", "unk_token": "<unk>", "vocab": {"a": 0}, "merges": []},
    ],
)
def test_a_vocabulary_without_the_token_of_unknown_words_is_refused(
    tmp_path: Path, content: dict[str, Any], model: dict[str, Any]
) -> None:
    content |= {"model": model, "added_tokens": [], "post_processor": None}

    found = _refusal(tmp_path / "tokenizer.json", content)

    assert "unk" in found.lower()  # as the library says it: "Missing [UNK] token", ...


def test_added_tokens_are_counted_before_any_is_looked_at(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    token = content["added_tokens"][0]
    content["added_tokens"] = [token | {"id": 2, "content": "x"}] * 200_000

    found = _refusal(tmp_path / "tokenizer.json", content, vocab_size=3)

    assert "it has 200000 added tokens, the model has a vocabulary of 3" in found


def test_id_outside_the_vocabulary_is_refused_however_few_there_are(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    content["model"]["vocab"]["a"] = 4_000_000_000

    found = _refusal(tmp_path / "tokenizer.json", content, vocab_size=3)

    assert "it has token ids up to 4000000000, the model has a vocabulary of 3" in found


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "s", "type_id": 0}}] * 2000,
                    "pair": [{"Sequence": {"id": "A", "type_id": 0}}] * 2000,
                    "special_tokens": {"s": {"id": "s", "ids": [1] * 1000, "tokens": ["a"] * 1000}},
                }
            },
            "post_processor adds 2,002,000 tokens",
        ),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [
                        {"type": "Prepend", "prepend": "a"},
                        *[{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40,
                    ],
                }
            },
            "normalizer makes a text more than 1,024 times as long",
        ),
        (  # the library would end the process
            {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b" * 10**6, 0.0]]}},
            "it has a token of 1,000,000 characters, more than 4,096",
        ),
    ],
)
def test_what_would_take_all_memory_or_end_the_process_is_refused(
    tmp_path: Path, content: dict[str, Any], edit: dict[str, Any], problem: str
) -> None:
    assert problem in _refusal(tmp_path / "tokenizer.json", content | edit)


@pytest.mark.parametrize("raw", ["[" * 200_000, '{"decoder": null, "decoder": null}', "[]", ""])
def test_what_is_no_json_object_is_refused(tmp_path: Path, raw: str) -> None:
    assert "is not a tokenizer" in _refusal(tmp_path / "tokenizer.json", raw)


def test_file_of_no_reasonable_size_is_not_read(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room on disk

    with pytest.raises(PackageError, match="it has more than 134,217,728 bytes"):
        Tokenizer(path)


def test_sound_file_is_read(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))

    assert Tokenizer(tmp_path / "tokenizer.json", 3).encode("a") == [2, 1]
