"""Every class of transformers that has a tokenizer of the library: a package's ids are its ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from tests.exporter.huggingface.lines import difficult_lines
from tests.exporter.huggingface.tokenizers.test_original_tokenizers import (
    read,
    train_spm,
    write_json,
)

FAIRSEQ = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "normalization_rule_name": "nmt_nfkc"}
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "normalization_rule_name": "nmt_nfkc"}
BPE = {"model_type": "bpe"}
LLAMA = {**BPE, "byte_fallback": True, "split_digits": True, "remove_extra_whitespaces": False}
GEMMA = {**LLAMA, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "add_dummy_prefix": False,
         "bos_piece": "<bos>", "eos_piece": "<eos>",
         "user_defined_symbols": ["\n", "<table>"]}  # fmt: skip
TRAINING = difficult_lines(800, seed=1)
BEGINS = {"add_bos_token": True}


class Class(NamedTuple):
    """A class as its models are published before they have a tokenizer.json."""

    name: str
    model_type: str
    file: str  # its pieces, or its words
    trained: dict[str, Any] = {}
    settings: dict[str, Any] = {}


CLASSES = [
    Class("T5Tokenizer", "t5", "spiece.model", T5),
    Class("T5Tokenizer", "mt5", "spiece.model", T5, {"extra_ids": 0}),
    Class("PegasusTokenizer", "pegasus", "spiece.model", T5),
    Class("LlamaTokenizer", "llama", "tokenizer.model", LLAMA, BEGINS),
    Class("LlamaTokenizer", "llama", "tokenizer.model", LLAMA, {**BEGINS, "legacy": True,
          "add_eos_token": True, "pad_token": "<|user|>"}),
    Class("LlamaTokenizer", "llama", "tokenizer.model", LLAMA, {"add_prefix_space": False}),
    Class("GemmaTokenizer", "gemma", "tokenizer.model", GEMMA, BEGINS),
    Class("XLMRobertaTokenizer", "xlm-roberta", "sentencepiece.bpe.model", FAIRSEQ),
    Class("CamembertTokenizer", "camembert", "sentencepiece.bpe.model", FAIRSEQ),
    Class("MBartTokenizer", "mbart", "sentencepiece.bpe.model", FAIRSEQ, {"src_lang": "de_DE"}),
    Class("MBart50Tokenizer", "mbart", "sentencepiece.bpe.model", FAIRSEQ),
    Class("NllbTokenizer", "m2m_100", "sentencepiece.bpe.model", {**FAIRSEQ, **BPE},
          {"added_tokens_decoder": {str(5000 + i): {"content": code, "special": True}
                                    for i, code in enumerate(("eng_Latn", "deu_Latn", "<mask>"))}}),
    Class("BertTokenizer", "bert", "vocab.txt"),
    Class("BertTokenizer", "bert", "vocab.txt", {}, {"do_lower_case": False}),
    Class("DistilBertTokenizer", "distilbert", "vocab.txt"),
    Class("GPT2Tokenizer", "gpt2", "vocab.json"),
    Class("GPT2Tokenizer", "opt", "vocab.json", {}, {**BEGINS, "bos_token": "</s>"}),
    Class("RobertaTokenizer", "roberta", "vocab.json", {}, {"add_prefix_space": True}),
    Class("BartTokenizer", "bart", "vocab.json"),
    Class("Qwen2Tokenizer", "qwen3", "vocab.json"),
    Class("GPTNeoXTokenizer", "gpt_neox", "vocab.json"),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Class], Path]:
    """Return a function that makes the files of a class, each kind of them once."""
    known: dict[str, Path] = {}

    def make(one: Class) -> Path:
        key = json.dumps([one.file, one.trained])
        if key not in known:
            known[key] = tmp_path_factory.mktemp("files")
            if one.file == "vocab.txt":
                _train_words(known[key])
            elif one.file == "vocab.json":
                _train_bytes(known[key])
            else:
                train_spm(known[key] / one.file, TRAINING, **{"vocab_size": 2500, **one.trained})
        return known[key]

    return make


def _train_words(path: Path) -> None:
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=2000, special_tokens=special, show_progress=False
    )
    trained.train_from_iterator([*TRAINING, *map(str.lower, TRAINING)], trainer)
    ids = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    words = [word for word, _ in ids if "\n" not in word and "\r" not in word]
    (path / "vocab.txt").write_text("\n".join(words) + "\n", newline="\n")


def _train_bytes(path: Path) -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<|endoftext|>", "<mask>", "<|padding|>"]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(TRAINING, trainer)
    trained.model.save(str(path))


@pytest.mark.parametrize("is_saved_again", [False, True], ids=["older files", "saved again"])
@pytest.mark.parametrize("one", CLASSES, ids=lambda one: f"{one.name} of {one.model_type}")
def test_ids_and_texts_are_those_of_the_class(
    one: Class, is_saved_again: bool, made: Callable[[Class], Path], tmp_path: Path
) -> None:
    shutil.copytree(made(one), tmp_path, dirs_exist_ok=True)
    write_json(tmp_path / "config.json", {"model_type": one.model_type})
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": one.name, **one.settings})
    original = AutoTokenizer.from_pretrained(tmp_path)
    if is_saved_again:
        original.save_pretrained(tmp_path)
        original = AutoTokenizer.from_pretrained(tmp_path)

    found = read(tmp_path)

    tokenizer = found.tokenizer
    assert tokenizer is not None
    special = original.all_special_tokens
    lines = difficult_lines(150, seed=2)
    for i, line in enumerate(lines[:50]):
        token = special[i % len(special)]
        lines.append(f"{line[:9]}{token}{line[9:]}" if i % 2 else f"{token} {line} {token}")
    for text in ("", " ", "  a", " a  b ", "\n", *lines):
        ids = original(text).input_ids
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids) == original.decode(ids, skip_special_tokens=True)
    for first, second in (("a b", "c"), (lines[0], lines[1])):
        pair = original(first, second)
        ours = tokenizer.encode(first, second)
        assert ours.ids == pair.input_ids
        assert ours.type_ids == pair.get("token_type_ids", ours.type_ids)
    assert found.cuts_left == (original.truncation_side == "left")
