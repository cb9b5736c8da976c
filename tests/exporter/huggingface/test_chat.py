"""A chat template goes with a model from its source to the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenweir
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from engine.requests.request import Chat, ChatMessage
from engine.text.chat_format import ChatFormat
from engine.text.chat_template import ChatTemplate
from exporter.checkpoint import load_checkpoint
from exporter.export import copied_files, export_package
from exporter.huggingface import import_checkpoint
from exporter.huggingface.tokenizers import read_tokenizer
from exporter.models import TransformerConfig
from tests.exporter.huggingface.sources import edit_json, save_llama

TEMPLATE = "{% for message in messages %}w3 {{ message.content }} {% endfor %}{{ eos_token }}"


def save_chat_model(path: Path, **settings: object) -> None:
    save_llama(path)
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "w9", "bos_token": "w8", **settings})
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


@pytest.mark.parametrize(
    ("told", "tool_format"),
    [
        ("<tool_call></tool_call>", "hermes"),
        ("<tool_call><function=f></tool_call>", None),
        ('{"name": function name, "parameters": dictionary of argument name}', "llama3_json"),
        ("[TOOL_CALLS] ", "mistral"),
        ("", None),
    ],
)
def test_the_format_of_calls_is_what_a_template_tells_the_model(
    told: str, tool_format: str | None, tmp_path: Path
) -> None:
    save_chat_model(tmp_path / "source", chat_template=f"{TEMPLATE}{{{{ {told!r} }}}}")

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    chat = load_checkpoint(tmp_path / "checkpoint").text.chat
    assert chat is not None and chat.tool_format == tool_format


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


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt2", {}),  # DialoGPT
        ("gpt2", {"eos_token": None}),
        ("gpt2", {"tokenizer_class": "GPT2TokenizerFast", "bos_token": "<s>"}),
        ("gpt_neox", {}),
        ("gpt_neox", {"tokenizer_class": "GPTNeoXTokenizer"}),
        ("llama", {"tokenizer_class": "LlamaTokenizer"}),
        ("llama", {"tokenizer_class": "LlamaTokenizer", "bos_token": None, "eos_token": "<eos>"}),
        ("llama", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("qwen2", {}),
        ("gemma2", {"tokenizer_class": "GemmaTokenizerFast"}),
    ],
)
def test_tokens_that_are_not_named_are_those_of_the_class_of_the_tokenizer(
    model_type: str, settings: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))

    assert_template_sees_what_transformers_gives(tmp_path, settings)


LISTED = {"9": {"content": "<s>", "special": True}}


@pytest.mark.parametrize("name", ["GPTNeoXTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("listed", [{}, {"added_tokens_decoder": LISTED}], ids=["", "listed"])
@pytest.mark.parametrize(
    ("said", "said_besides"),
    [
        ({}, {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}),
        ({"bos_token": "<bos>", "pad_token": "<pad>"}, {"bos_token": "<s>"}),
        ({"bos_token": "<bos>"}, {"bos_token": None}),
        ({"bos_token": None}, {"bos_token": "<s>", "unk_token": "<eos>"}),
    ],
)
def test_tokens_of_two_files_are_those_that_transformers_takes(
    name: str,
    listed: dict[str, object],
    said: dict[str, object],
    said_besides: dict[str, object],
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(said_besides))

    settings = {"tokenizer_class": name, **listed, **said}
    assert_template_sees_what_transformers_gives(tmp_path, settings)


def assert_template_sees_what_transformers_gives(path: Path, settings: dict[str, object]) -> None:
    names = ("<unk>", "<s>", "</s>", "<bos>", "<eos>", "<|endoftext|>", "<pad>", "<|padding|>")
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    made.save(str(path / "tokenizer.json"))
    tokens = "".join(f"{{{{ {name}_token }}}}, " for name in ("bos", "eos", "unk", "pad"))
    said = {**settings, "chat_template": tokens + "{{ messages[0].content }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    original = AutoTokenizer.from_pretrained(path)
    config = TransformerConfig.model_construct(
        architecture="decoder", vocab_size=99, eos_token_id=2, source_vocab_size=None
    )

    form = read_tokenizer(path, config).files.chat

    assert form is not None
    template = ChatTemplate(form)
    text = template.render(Chat((ChatMessage("user", "hello"),)))
    wanted = original.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == wanted


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
