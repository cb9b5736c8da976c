"""A chat template goes with a model from its source to the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenweir

from engine.text.chat_format import ChatFormat
from exporter.checkpoint import load_checkpoint
from exporter.export import copied_files, export_package
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.sources import edit_json, save_llama

TEMPLATE = "{% for message in messages %}w3 {{ message.content }} {% endfor %}{{ eos_token }}"


def save_chat_model(path: Path, **settings: object) -> None:
    save_llama(path)
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "w9"}, "bos_token": "w8", **settings})
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"chat_template": TEMPLATE},
        {"chat_template": [{"name": "tools", "template": ""},
                           {"name": "default", "template": TEMPLATE}]},
    ],
)  # fmt: skip
def test_a_template_of_the_settings_is_kept_with_its_tokens(
    settings: dict[str, object], tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "checkpoint"
    save_chat_model(source, **settings)

    import_checkpoint(source, out)

    checkpoint = load_checkpoint(out)
    tokens = {"eos_token": "w9", "bos_token": "w8"}
    assert checkpoint.text.chat == ChatFormat(template=TEMPLATE, tokens=tokens)
    assert "chat.json" in copied_files(checkpoint)


def test_a_template_of_its_own_file_is_taken_before_that_of_the_settings(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "checkpoint"
    save_chat_model(source, chat_template="other")
    (source / "chat_template.jinja").write_text(TEMPLATE)

    import_checkpoint(source, out)

    chat = load_checkpoint(out).text.chat
    assert chat is not None and chat.template == TEMPLATE
    edit_json(source / "tokenizer_config.json", chat_template=None)
    (source / "chat_template.jinja").unlink()
    import_checkpoint(source, out)
    assert load_checkpoint(out).text.chat is None


@pytest.mark.long
def test_a_server_answers_a_conversation_as_the_text_that_the_template_makes(
    tmp_path: Path,
) -> None:
    source, out, package = (tmp_path / name for name in ("source", "checkpoint", "package"))
    save_chat_model(source, chat_template=TEMPLATE)
    import_checkpoint(source, out)
    export_package(out, package)

    with tokenweir.load(package, max_num_seqs=2, num_threads=1) as client:
        said = [{"role": "user", "content": "w1"}, {"role": "user", "content": "w2 w7"}]
        chat = client.generate("package", said, max_new_tokens=5)
        text = client.generate("package", "w3 w1 w3 w2 w7 w9", max_new_tokens=5)

    assert chat.text and chat.text == text.text
    assert chat.usage.input_tokens == 6
