"""A `tokenizer.json` is read as transformers reads it: beside it count the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.models.bert.tokenization_bert import BertTokenizer
from transformers.models.mbart.tokenization_mbart import MBartTokenizer
from transformers.models.nllb.tokenization_nllb import NllbTokenizer
from transformers.models.roberta.tokenization_roberta import RobertaTokenizer

from tests.exporter.huggingface.encoders import tokenizer as word_pieces
from tests.exporter.huggingface.tokenizers.test_original_tokenizers import (
    read,
    train_spm,
    write_json,
)

TEXT = "New York is far"


def save(directory: Path, its_tokenizer: Tokenizer, **settings: Any) -> None:
    """Write the two files."""
    its_tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", settings)


def translating(directory: Path, kind: str) -> Tokenizer:
    """Return the tokenizer of a translation model, which says nothing of a source's language."""
    algorithm = {"model_type": "bpe" if kind == "NllbTokenizer" else "unigram"}
    train_spm(directory / "sentencepiece.bpe.model", [TEXT] * 9, vocab_size=20, **algorithm)
    codes = ("eng_Latn", "fra_Latn", "<mask>")
    listed = {19 + i: {"content": code, "special": True} for i, code in enumerate(codes)}
    more = {"added_tokens_decoder": listed} if kind == "NllbTokenizer" else {}
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": kind, **more})
    made = read(directory).tokenizer
    assert made is not None
    language = {"NllbTokenizer": "eng_Latn", "MBartTokenizer": "en_XX"}[kind]
    made.post_processor = processors.TemplateProcessing(  # as that of NLLB is published
        single=f"$A </s> {language}",
        special_tokens=[("</s>", 2), (language, made.token_to_id(language))],
    )
    return made


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (NllbTokenizer, {"src_lang": None}),
        (NllbTokenizer, {"src_lang": "fra_Latn"}),
        (NllbTokenizer, {"legacy_behaviour": True}),
        (MBartTokenizer, {"src_lang": "ro_RO"}),
    ],
)
def test_a_source_is_in_the_language_of_the_settings(
    kind: type[Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    made = translating(tmp_path, kind.__name__)
    save(tmp_path, made, tokenizer_class=kind.__name__, **settings)

    found = read(tmp_path).tokenizer

    assert found is not None
    assert found.encode(TEXT).ids == kind.from_pretrained(tmp_path)(TEXT).input_ids


def test_a_file_of_no_class_says_all_of_a_source(tmp_path: Path) -> None:
    made = translating(tmp_path, "NllbTokenizer")
    save(tmp_path, made, tokenizer_class="PreTrainedTokenizerFast")

    found = read(tmp_path, model_type="m2m_100").tokenizer

    assert found is not None
    assert found.encode(TEXT).ids == made.encode(TEXT).ids


@pytest.mark.parametrize(
    "settings",
    [
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": True},
    ],
)
def test_a_bert_keeps_case_and_accents_where_the_settings_say_so(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, word_pieces(), tokenizer_class="BertTokenizer", **settings)
    original = BertTokenizer.from_pretrained(tmp_path)

    found = read(tmp_path, "encoder").tokenizer

    assert found is not None
    for text in (TEXT, TEXT.lower(), "Néw yörk"):
        assert found.encode(text).ids == original(text).input_ids


def byte_level(*, adds_space: bool) -> Tokenizer:
    """Return a tokenizer of bytes as RoBERTa has it."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    names += sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return made


def unigram() -> Tokenizer:
    """Return a tokenizer of pieces as T5 and XLM-R have it, which says nothing of ends."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = [(name, 0.0) for name in names] + [("▁", -2.0), ("▁New", -1.0), ("▁York", -1.0)]
    made = Tokenizer(models.Unigram(pieces, unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens(names)
    return made


@pytest.mark.parametrize("said", ["nothing", "bytes", "another order"])
@pytest.mark.parametrize(
    ("make", "kind", "model_type"),
    [
        (word_pieces, "BertTokenizer", "bert"),
        (word_pieces, "DistilBertTokenizer", "distilbert"),
        (word_pieces, None, "bert"),
        (lambda: byte_level(adds_space=False), "RobertaTokenizerFast", "roberta"),
        (lambda: byte_level(adds_space=False), "BartTokenizer", "bart"),
        (lambda: byte_level(adds_space=False), None, "roberta"),
        (lambda: byte_level(adds_space=False), "PreTrainedTokenizerFast", "roberta"),
        (unigram, "XLMRobertaTokenizer", "xlm-roberta"),
        (unigram, "CamembertTokenizer", "camembert"),
        (unigram, "T5Tokenizer", "t5"),
        (unigram, "PegasusTokenizer", "pegasus"),
        (unigram, None, "mt5"),
    ],
)
def test_around_a_text_stands_what_the_class_puts_there(
    make: Callable[[], Tokenizer], kind: str | None, model_type: str, said: str, tmp_path: Path
) -> None:
    made = make()
    first = "[CLS]" if made.token_to_id("[CLS]") is not None else "<s>"
    made.post_processor = {
        "nothing": processors.Sequence([]),
        "bytes": processors.ByteLevel(trim_offsets=False),
        "another order": processors.TemplateProcessing(
            single=f"$A {first}", special_tokens=[(first, made.token_to_id(first))]
        ),
    }[said]
    save(tmp_path, made, **({"tokenizer_class": kind} if kind else {}))
    write_json(tmp_path / "config.json", {"model_type": model_type})
    original = AutoTokenizer.from_pretrained(tmp_path)

    found = read(tmp_path, "encoder", model_type=model_type).tokenizer

    assert found is not None
    assert found.encode("New York").ids == original("New York").input_ids
    pair, expected = found.encode("New", "York"), original("New", "York")
    assert pair.ids == expected.input_ids
    assert pair.type_ids == expected.get("token_type_ids", pair.type_ids)


@pytest.mark.parametrize("adds_space", [True, False])
def test_a_text_begins_with_a_space_where_the_settings_say_so(
    adds_space: bool, tmp_path: Path
) -> None:
    said = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": adds_space}
    save(tmp_path, byte_level(adds_space=not adds_space), **said)

    found = read(tmp_path, "encoder", model_type="roberta").tokenizer

    assert found is not None
    assert found.encode(TEXT).ids == RobertaTokenizer.from_pretrained(tmp_path)(TEXT).input_ids


CALL = "<tool_call>"


def listed(content: str, **flags: bool) -> dict[str, Any]:
    """Return a token as `added_tokens_decoder` has it."""
    usual = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": True}
    return {"content": content, "special": False, **usual, **flags}


SPECIAL = {"special": True, "normalized": False}
OTHER = {"unk_token": "<unk>", "eos_token": "</s>"}
BESIDES: list[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any], dict[str, int]]] = [
    # tokens of tokenizer.json, tokenizer_config.json, special_tokens_map.json, added_tokens.json
    ([], {"added_tokens_decoder": {"259": listed(CALL)}}, {}, {}),
    ([], {"added_tokens_decoder": {"259": listed(CALL, **SPECIAL)}}, {}, {}),
    ([], {"added_tokens_decoder": {"259": {"content": CALL}}}, {}, {}),
    ([], {"added_tokens_decoder": {"260": listed("<x>"), "259": listed(CALL)}}, {}, {}),
    ([], {"added_tokens_decoder": {"262": listed(CALL, lstrip=True)}}, {}, {}),
    ([], {"additional_special_tokens": [CALL]}, {}, {}),
    ([], {}, {"additional_special_tokens": [CALL]}, {}),
    ([], {"extra_special_tokens": [CALL], "additional_special_tokens": ["<x>"]}, {}, {}),
    ([], {"extra_special_tokens": {"tool_token": CALL}}, {}, {}),
    ([], {"tool_token": CALL}, {}, {}),
    ([], {"tool_token": {"__type": "AddedToken", **listed(CALL, lstrip=True)}}, {}, {}),
    ([], {"model_specific_special_tokens": {"tool_token": CALL}}, {}, {}),
    ([], {"cls_token": CALL, "sep_token": "<x>"}, {}, {}),
    ([], {"pad_token": CALL}, {}, {}),
    ([], {"pad_token": {"__type": "AddedToken", **listed(CALL)}}, {}, {}),
    ([], {}, {"pad_token": CALL}, {}),
    ([], {"added_tokens_decoder": {"259": listed("<x>", **SPECIAL)}}, {"pad_token": CALL}, {}),
    ([], {}, {}, {CALL: 259}),
    ([listed(CALL)], {"added_tokens_decoder": {"259": listed(CALL, **SPECIAL)}}, {}, {}),
    ([listed(CALL)], {"eos_token": CALL}, {}, {}),
    ([listed(CALL)], {"additional_special_tokens": [CALL]}, {}, {}),
    ([listed(CALL, **SPECIAL)], {"added_tokens_decoder": {"259": listed(CALL)}}, {}, {}),
    ([listed(CALL, **SPECIAL)], {}, {}, {CALL: 259}),
]


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(("in_file", "said", "named", "older"), BESIDES)
def test_added_tokens_are_those_of_all_files(
    in_file: list[dict[str, Any]],
    said: dict[str, Any],
    named: dict[str, Any],
    older: dict[str, int],
    kind: str,
    tmp_path: Path,
) -> None:
    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(names[:3])
    made.add_tokens([AddedToken(**token) for token in in_file])
    save(tmp_path, made, tokenizer_class=kind, **{**OTHER, **said})
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    for name, content in (("special_tokens_map", named), ("added_tokens", older)):
        if content:
            write_json(tmp_path / f"{name}.json", content)
    original = AutoTokenizer.from_pretrained(tmp_path)

    found = read(tmp_path, "decoder", model_type="llama").tokenizer

    assert found is not None
    ids = original(f"a {CALL} b <TOOL_CALL> x<x></s>").input_ids
    assert found.encode(f"a {CALL} b <TOOL_CALL> x<x></s>").ids == ids
    assert found.decode(ids) == original.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("said", "kept", "lost"),
    [
        ({"added_tokens_decoder": {"259": listed(CALL), "264": listed("<x>")}}, CALL, "<x>"),
        (
            {"added_tokens_decoder": {"264": listed("<x>")}, "pad_token": "<x>", "cls_token": CALL},
            "<x>",
            CALL,
        ),
        ({"pad_token": CALL, "cls_token": "<x>"}, CALL, "<x>"),
        ({"additional_special_tokens": [CALL, "<x>"]}, CALL, "<x>"),
    ],
)
def test_added_tokens_that_a_model_has_no_room_for_are_left_out_and_named(
    said: dict[str, Any], kept: str, lost: str, tmp_path: Path
) -> None:
    save(tmp_path, byte_level(adds_space=False), tokenizer_class="LlamaTokenizer", **said)

    found = read(tmp_path, "decoder", vocab_size=262, model_type="llama")

    assert found.tokenizer is not None
    assert found.tokenizer.token_to_id(kept) == 261
    assert found.tokenizer.token_to_id(lost) is None
    assert found.notes == (f"tokens above the vocabulary are left out: {lost!r}",)
