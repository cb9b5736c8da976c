"""Texts are read as by the original's tokenizer, and conversations; a wrong reading is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import CheckpointError
from exporter.compare.original_texts import compare_texts
from exporter.huggingface import import_checkpoint
from exporter.huggingface.tokenizers import Languages
from tests.exporter.huggingface.encoders import save_encoder, save_sentence_modules
from tests.exporter.huggingface.sources import VOCAB_SIZE, edit_json, save_gpt2, save_llama

CHAT = (
    "{% for one in messages %}w3 {{ one.role }} {{ one.content | trim }} {% endfor %}"
    "{% if add_generation_prompt %}w9{% endif %}"
)

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
PARTS = (
    "{% for one in messages %}{% for part in one.content %}{{ part.text }}{% endfor %}{% endfor %}"
)


def save_talker(path: Path) -> None:
    """Save a decoder whose tokenizer transformers saved, with added tokens and a template."""
    save_llama(path, vocab_size=VOCAB_SIZE + 2)
    made = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    made.add_tokens(["<tool>", "<image>"])
    made.chat_template = CHAT
    made.save_pretrained(path)


def save_embedder(path: Path) -> None:
    """Save an encoder as sentence-transformers does, which cuts the beginnings of texts off."""
    save_encoder(path, "bert", "embed")
    save_sentence_modules(path, "mean_tokens")
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6}))
    tokens = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    made = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), **tokens)
    made.save_pretrained(path)
    edit_json(path / "tokenizer_config.json", truncation_side="left")


def test_texts_and_conversations_of_a_decoder_are_compared(tmp_path: Path) -> None:
    save_talker(tmp_path / "original")
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")

    found = compare_texts(tmp_path / "original", tmp_path / "checkpoint", Languages())

    assert found.words == ("97 texts", "4 conversations") and found.notes == ()


@pytest.mark.parametrize(
    ("named", "count"),
    [
        (NO_SYSTEM + CHAT, 2),
        (PARTS, 4),
        ([{"name": "rag", "template": CHAT}, {"name": "tools", "template": "x"}], 4),
        ("hello", 0),
    ],
    ids=["refuses a system", "takes parts alone", "names no default", "shows nothing said"],
)
def test_odd_templates_are_compared_as_they_are_taken(
    named: Any, count: int, tmp_path: Path
) -> None:
    save_talker(tmp_path / "original")
    (tmp_path / "original" / "chat_template.jinja").unlink()
    edit_json(tmp_path / "original" / "tokenizer_config.json", chat_template=named)
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")

    found = compare_texts(tmp_path / "original", tmp_path / "checkpoint", Languages())

    assert found.words[1:] == ((f"{count} conversations",) if count else ())
    assert ("chats are refused" in "".join(found.notes)) is (count == 0)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 10**10**10 }}",
        "{{ 'a' * 99999999999 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    ],
    ids=["power", "memory", "loops"],
)
def test_a_template_without_bounds_is_told(template: str, tmp_path: Path) -> None:
    save_talker(tmp_path / "original")
    (tmp_path / "original" / "chat_template.jinja").write_text(template + CHAT)
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")

    found = compare_texts(tmp_path / "original", tmp_path / "checkpoint", Languages())

    assert found.words == ("93 texts",) and "chats are refused" in found.notes[0]


def test_texts_of_an_embedder_are_compared_pairs_and_cut_ones_too(tmp_path: Path) -> None:
    save_embedder(tmp_path / "original")
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")

    found = compare_texts(tmp_path / "original", tmp_path / "checkpoint", Languages())

    assert found.words == ("71 texts",) and found.notes == ()


def tokenizer(**changed: Any) -> Callable[[Path], None]:
    """Change parts of a checkpoint's tokenizer."""
    return lambda checkpoint: edit_json(checkpoint / "tokenizer.json", **changed)


def drop_added(checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.json"
    edit_json(path, added_tokens=json.loads(path.read_text())["added_tokens"][:-1])


def cut_other_side(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    edit_json(path, model={**json.loads(path.read_text())["model"], "cuts_left": False})


def template(changed: str) -> Callable[[Path], None]:
    """Change the template of conversations."""
    return lambda checkpoint: edit_json(checkpoint / "chat.json", template=changed)


def save_strict_talker(path: Path) -> None:
    """Save a decoder that refuses what a system says."""
    save_talker(path)
    (path / "chat_template.jinja").write_text(NO_SYSTEM + CHAT)


WRONG: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], str]] = {
    "an added token dropped": (save_talker, drop_added, "8 of 97 texts are not read or written"),
    "tokens around a text dropped": (
        save_embedder,
        tokenizer(post_processor=None),
        "not read or written",
    ),
    "another way of writing": (
        save_talker,
        tokenizer(decoder={"type": "Fuse"}),
        r"of 'the text of \[.*' it makes",
    ),
    "letters left as they are": (save_embedder, tokenizer(normalizer=None), "not read or written"),
    "side on which texts are cut": (save_embedder, cut_other_side, "cut to 6 tokens' it makes"),
    "a chat template changed": (
        save_talker,
        template(CHAT.replace("w9", "w8")),
        "' w8', there ' w9'",
    ),
    "a chat template that refuses": (
        save_talker,
        template(NO_SYSTEM + CHAT),
        "it makes 'no text, but a r', there 'w3 system",
    ),
    "a chat template that cannot be read": (
        save_talker,
        template("{% for"),
        "it makes 'no text, but a r', there 'w3 user",
    ),
    "a chat template that takes all": (
        save_strict_talker,
        template(CHAT),
        "it makes 'w3 system Be bri', there 'no text",
    ),
    "a chat template dropped": (
        save_talker,
        lambda checkpoint: (checkpoint / "chat.json").unlink(),
        "the chat template is not that of TokenizersBackend",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reading_is_refused(name: str, tmp_path: Path) -> None:
    save, change, said = WRONG[name]
    save(tmp_path / "original")
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")
    change(tmp_path / "checkpoint")

    with pytest.raises(CheckpointError, match=f"{said}.*import with --no-comparison"):
        compare_texts(tmp_path / "original", tmp_path / "checkpoint", Languages())


def test_where_special_tokens_are_taken_apart_a_difference_is_told(tmp_path: Path) -> None:
    save_embedder(tmp_path / "original")
    edit_json(tmp_path / "original" / "tokenizer_config.json", split_special_tokens=True)
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")

    found = compare_texts(tmp_path / "original", tmp_path / "checkpoint", Languages())

    assert "texts are not read or written as by TokenizersBackend" in found.notes[0]
    assert "exporter/docs/reference/tokenizers.md says what differs" in found.notes[0]


def test_a_file_that_is_larger_than_an_import_reads_is_told(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "original")
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")
    with (tmp_path / "original" / "vocab.json").open("wb") as file:
        file.truncate(2**30)  # which takes no room on a disk

    found = compare_texts(tmp_path / "original", tmp_path / "checkpoint", Languages())

    assert "for ValueError: vocab.json: it has more than" in found.notes[0]


def test_a_tokenizer_that_transformers_does_not_load_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*given: Any, **options: Any) -> None:
        raise ValueError("no such class\nand much more")

    save_gpt2(tmp_path / "original")
    import_checkpoint(tmp_path / "original", tmp_path / "checkpoint")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)

    found = compare_texts(tmp_path / "original", tmp_path / "checkpoint", Languages())

    told = "not compared with its original, for ValueError: transformers reads none: no such class"
    assert found.words == () and told in found.notes[0]
