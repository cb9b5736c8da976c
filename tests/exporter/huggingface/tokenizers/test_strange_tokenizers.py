"""Files of strangers: nothing of them runs, is fetched or told, and no size is without a bound."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from engine.errors import CheckpointError
from exporter.huggingface.tokenizers import original
from tests.exporter.huggingface.sources import save_gpt2
from tests.exporter.huggingface.tokenizers.test_original_tokenizers import (
    read,
    train_spm,
    write_json,
)

PIECES = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "vocab_size": 10}


@pytest.fixture(autouse=True)
def scratch(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Give the system's temporary directory, in which nothing is left at the end."""
    path = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr("tempfile.tempdir", str(path))
    yield path
    assert not os.listdir(path)


def lay_out(path: Path, kind: str, **settings: Any) -> None:
    """Write the older files of a class."""
    write_json(path / "tokenizer_config.json", {"tokenizer_class": kind, **settings})
    if kind == "GPT2Tokenizer":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        write_json(path / "vocab.json", {text: i for i, text in enumerate([*letters, "ab", "bc"])})
        (path / "merges.txt").write_text("#version: 0.2\na b\n")
    else:
        train_spm(path / "spiece.model", ["a b c"] * 9, **PIECES)


def test_copies_that_a_killed_import_has_left_are_removed(scratch: Path, tmp_path: Path) -> None:
    (scratch / "tokenweir-import-killed00").mkdir()
    (scratch / "tokenweir-import-killed00" / "vocab.json").write_text("{}")
    lay_out(tmp_path, "T5Tokenizer")

    assert read(tmp_path).tokenizer is not None


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_map": {"AutoTokenizer": ["a.B", None]}}, "auto_map: its tokenizer is code, which"),
        ({"extra_ids": 10**12}, "extra_ids is 1000000000000, the model has a vocabulary of 9000"),
        ({"offset": 10**12}, "offset is 1000000000000, the model has a vocabulary of 9000"),
        ({"mask_token": "a" * 10**6}, "it has a token of 1,000,000 characters, more than 4,096"),
        ({"eos_token": 5}, "transformers reads none: Special token eos_token has to be"),
        ({"added_tokens_decoder": {"a": {"content": "b"}}}, "transformers reads none: "),
        ({"added_tokens_decoder": {"7": "b"}}, "transformers reads none: Found a <class 'str'>"),
        ({"truncation_side": "up"}, "Truncation side should be selected between"),
        ({"chat_template": 5}, "chat_template is 5, no text"),
        ({"chat_template": "x" * 2**21}, "its chat template has more than"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_line(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    lay_out(tmp_path, "T5Tokenizer", **settings)

    assert message in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"]
)
@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a": 1, "a": 2}', b"[]", b"\xff"])
def test_json_that_cannot_be_understood_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    lay_out(tmp_path, "GPT2Tokenizer")
    (tmp_path / name).write_bytes(content)

    assert f"has no tokenizer of this model: {name}: " in refusal(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "chat_template.jinja"])
def test_file_that_is_too_large_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path, "GPT2Tokenizer")
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**24)
    monkeypatch.setattr(original, "_VOCABULARY_BYTES", 2**16)

    assert f"{name}: it has more than" in refusal(tmp_path)


def test_long_pieces_are_refused_before_they_are_cut_into_all_their_parts(tmp_path: Path) -> None:
    lay_out(tmp_path, "T5Tokenizer")
    path = tmp_path / "spiece.model"
    path.write_bytes(path.read_bytes() + b"\x0a\x84\x10\x0a\x81\x10" + b"a" * 2049)

    assert "spiece.model: it has long pieces" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"a": 0}, "transformers reads none: it lacks '<unk> token must be in the vocab'"),
        ({"<unk>": 0, "a": 2}, "the ids of vocab.json are not 0, 1, 2 and so on"),
        ({"<unk>": 0, "a": "1"}, "the ids of vocab.json are not 0, 1, 2 and so on"),
        ({"<unk>": 0, "a": [1]}, "transformers reads none: unhashable type"),
        ({"<unk>": 0, "\u3042" * 100_000: 1}, "vocab.json: it has a token of 100,000 characters"),
    ],
)
def test_vocabularies_that_cannot_be_are_refused_in_a_line(
    ids: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "MarianTokenizer"})
    write_json(tmp_path / "vocab.json", ids)
    for name in ("source.spm", "target.spm"):
        train_spm(tmp_path / name, ["a b c"] * 9, **PIECES)

    assert message in refusal(tmp_path)


def test_nothing_is_fetched_told_or_read_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere.txt"
    elsewhere.write_text("#version: 0.2\nb c\n")
    names = {"merges_file": str(elsewhere), "gguf_file": "../model.gguf", "init_inputs": ["a"]}
    (tmp_path / "source").mkdir()
    lay_out(tmp_path / "source", "GPT2Tokenizer", clean_up_tokenization_spaces=True, **names)

    def refuse(*args: object, **options: object) -> socket.socket:
        raise AssertionError("an import calls nobody")

    monkeypatch.setattr(socket, "socket", refuse)
    capfd.readouterr()
    found = read(tmp_path / "source")

    assert found.tokenizer is not None
    assert found.tokenizer.encode("abc").tokens == ["ab", "c"]
    assert capfd.readouterr() == ("", "")


def test_a_file_that_its_class_reads_otherwise_is_told(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "source")
    named = tmp_path / "source" / "tokenizer_config.json"
    named.write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))

    notes = read(tmp_path / "source").notes

    assert "has a WordLevel model, and LlamaTokenizer of transformers 5 reads it as BPE" in str(
        notes
    )


def test_a_full_disk_is_no_fault_of_the_tokenizer(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lay_out(tmp_path, "GPT2Tokenizer")
    monkeypatch.setattr(Path, "write_bytes", full)

    said = refusal(tmp_path)

    assert said.startswith(f"cannot write {scratch}: No space left on device; free space there")
    assert said.endswith("or set TMPDIR to a directory with room")
