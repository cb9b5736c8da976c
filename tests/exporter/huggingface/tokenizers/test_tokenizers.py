"""Tokenizers that an import makes, against the libraries that they are made for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer

from engine.errors import CheckpointError
from exporter.huggingface.tokenizers import Languages, read_tokenizer
from exporter.huggingface.tokenizers.charsmap import read_charsmap
from exporter.huggingface.tokenizers.sentencepiece_model import convert, read_sentencepiece
from exporter.models import TransformerConfig
from tests.exporter.huggingface.lines import difficult_lines

FAIRSEQ = {"unk_id": 0, "bos_id": 1, "eos_id": 2}
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
GEMMA = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "add_dummy_prefix": False,
         "bos_piece": "<bos>", "eos_piece": "<eos>"}  # fmt: skip
BYTES = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}

# Options of published models; the last two show some that few have.
MODELS: dict[str, dict[str, Any]] = {
    "unigram": {},
    "bpe": {"model_type": "bpe"},
    "char": {"model_type": "char", "user_defined_symbols": ["<2en>", "-="]},
    "llama": BYTES,
    "gemma": {
        **BYTES,
        **GEMMA,
        "user_defined_symbols": ["<unused0>", "\n", "\n\n", "▁▁", "<table>"],
    },
    "case folded, bytes": {"normalization_rule_name": "nmt_nfkc_cf", "byte_fallback": True},
    "identity, symbols": {
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["<2en>", "▁▁", "-="],
    },
}

# A character that becomes several, whose last goes on with a mark behind it: here the two compose.
SEVERAL = {chr(0x344), chr(0x149)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that trains a model with these options, once."""
    lines, made = difficult_lines(3000, seed=1), {}

    def train(**options: Any) -> Path:
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("sentencepiece") / "model"
            with made[key].open("wb") as file:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=iter(lines),
                    model_writer=file,
                    **{"vocab_size": 3500, "hard_vocab_limit": False, "minloglevel": 2, **options},
                    character_coverage=0.98,
                )
        return made[key]

    return train


def source_with(directory: Path, name: str, model: Path, **settings: Any) -> None:
    """Lay a model out as it is published."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(model.read_bytes())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def config(architecture: str = "encoder-decoder", vocab_size: int = 5000) -> TransformerConfig:
    """Return what a tokenizer is held against."""
    return TransformerConfig.model_construct(
        architecture=architecture, vocab_size=vocab_size, eos_token_id=2, source_vocab_size=None
    )


def unexplained(
    model: sentencepiece.SentencePieceProcessor, tokenizer: Tokenizer, lines: list[str]
) -> Iterator[str]:
    """Yield the lines that are cut otherwise than by the library, unless it is known why."""
    for line, ids, found in zip(
        lines, model.encode(lines), tokenizer.encode_batch(lines), strict=True
    ):
        if list(ids) == found.ids:
            continue
        if normalized(tokenizer, line) != model.normalize(line):
            if not SEVERAL & set(line):
                yield f"normalized: {line!r}"
        elif not equally_likely(model, found.ids, ids):
            yield f"{line!r}: {model.id_to_piece(ids)}, here {found.tokens}"


def normalized(tokenizer: Tokenizer, line: str) -> str:
    return tokenizer.normalizer.normalize_str(line) if tokenizer.normalizer else line


def equally_likely(
    model: sentencepiece.SentencePieceProcessor, cut: list[int], other: list[int]
) -> bool:
    """Say whether a unigram model finds two ways to cut a text as good: either may be taken."""
    scores = [sum(map(model.get_score, ids)) for ids in (cut, other)]
    return abs(scores[0] - scores[1]) < 1e-3


def convert_alone(path: Path) -> Tokenizer:
    """Return the tokenizer of a model whose ids are those of its own pieces."""
    model = read_sentencepiece(path)
    return convert(model, model.pieces)


@pytest.mark.parametrize(
    ("name", "num_lines"),
    [
        *((name, 1000) for name in MODELS if name != "case folded, bytes"),
        *(pytest.param(name, 10_000, marks=pytest.mark.long) for name in MODELS),
    ],
)
def test_a_text_is_cut_as_sentencepiece_cuts_it(
    name: str, num_lines: int, trained: Callable[..., Path]
) -> None:
    path = trained(**MODELS[name])
    original = sentencepiece.SentencePieceProcessor(model_file=str(path))

    assert not list(unexplained(original, convert_alone(path), difficult_lines(num_lines)))


@pytest.mark.parametrize("algorithm", ["unigram", "bpe"])
def test_symbols_of_a_user_are_found_where_sentencepiece_finds_them(
    algorithm: str, trained: Callable[..., Path]
) -> None:
    path = trained(model_type=algorithm, user_defined_symbols=["<2en>", "<sep>"])
    original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    lines = ["<2en> hello there", "a<2en>b", "a<sep>b <sep> c", " <2en><2en>", "\uff1c2en\uff1e a"]

    assert not list(unexplained(original, convert_alone(path), lines))


@pytest.mark.parametrize("num_lines", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_text_comes_back_as_sentencepiece_gives_it_back(
    num_lines: int, trained: Callable[..., Path]
) -> None:
    for options in (BYTES, {}):
        path = trained(**options)
        original = sentencepiece.SentencePieceProcessor(model_file=str(path))
        tokenizer = convert_alone(path)

        for line in difficult_lines(num_lines, seed=3):
            ids = original.encode(line)
            known = [i for i in ids if not original.is_unknown(i)]
            found = tokenizer.decode(known)
            # Text behind an unknown character at the start keeps its space.
            assert found.lstrip(" ") == original.decode(known).lstrip(" ")
            assert len(known) < len(ids) or found == original.decode(ids)


def test_a_language_is_put_where_the_model_was_trained_with_it(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    source_with(tmp_path, "sentencepiece.bpe.model", trained(**FAIRSEQ),
                tokenizer_class="MBart50Tokenizer")  # fmt: skip

    found = read_tokenizer(tmp_path, config(), languages=Languages("de_DE", "fr_XX"))

    tokenizer = found.tokenizer
    assert tokenizer.encode("").tokens == ["de_DE", "</s>"]
    assert found.target_language == tokenizer.token_to_id("fr_XX")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = read_tokenizer(tmp_path, config(), languages=Languages("en_XX"))
    assert again.tokenizer.encode("").tokens == ["en_XX", "</s>"]


@pytest.mark.parametrize(
    ("kind", "languages", "message"),
    [
        ("MBartTokenizer", Languages("deu_Latn"), "language 'deu_Latn' is not one of the model's"),
        ("MBartTokenizer", Languages(None, "de"), "language 'de' is not one of the model's"),
        ("XLMRobertaTokenizer", Languages("de_DE"), "leave --source-lang out"),
        ("XLMRobertaTokenizer", Languages(None, "de_DE"), "leave --target-lang out"),
        ("PegasusTokenizer", Languages(), "transformers reads none: .*; save it again with"),
        ("SomeTokenizer", Languages(), "Couldn't instantiate the backend .*; save it again with"),
        ("T5Tokenizer", Languages(), "no file for its T5Tokenizer, spiece.model, tokenizer.json"),
        ("NllbTokenizer", Languages(), "languages get other ids in transformers 5"),
        ("MBartTokenizer", Languages(), "the model has a vocabulary of 20"),
    ],
)
def test_what_does_not_fit_is_refused(
    kind: str, languages: Languages, message: str, trained: Callable[..., Path], tmp_path: Path
) -> None:
    model = trained(**FAIRSEQ)
    source_with(tmp_path, "sentencepiece.bpe.model", model, tokenizer_class=kind)
    room = 20 if "vocabulary" in message else 5000

    with pytest.raises(CheckpointError, match=message):
        read_tokenizer(tmp_path, config(vocab_size=room), languages=languages)


def test_a_model_of_whole_words_is_refused(trained: Callable[..., Path], tmp_path: Path) -> None:
    source_with(tmp_path, "spiece.model", trained(model_type="word"), tokenizer_class="T5Tokenizer")

    with pytest.raises(
        CheckpointError, match=r"whole words as pieces \(model type word\); supported"
    ):
        read_tokenizer(tmp_path, config())


@pytest.mark.parametrize(
    ("name", "kind", "is_told"),
    [("spiece.model", "T5Tokenizer", True), ("tokenizer.model", "LlamaTokenizer", False)],
)
def test_spaces_that_transformers_takes_out_of_answers_are_told(
    name: str, kind: str, is_told: bool, trained: Callable[..., Path], tmp_path: Path
) -> None:
    options = T5 if is_told else BYTES
    source_with(tmp_path, name, trained(**options), tokenizer_class=kind,
                clean_up_tokenization_spaces=True)  # fmt: skip
    writes = config().model_copy(update={"num_decoder_layers": 1})

    notes = read_tokenizer(tmp_path, writes).notes

    assert any("clean_up_tokenization_spaces takes" in note for note in notes) is is_told


def test_tokens_that_are_added_above_the_vocabulary_are_left_out(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    added = {"3600": {"content": "<here>"}, "5000": {"content": "<image>"}}
    source_with(tmp_path, "spiece.model", trained(**T5), tokenizer_class="T5Tokenizer",
                added_tokens_decoder=added)  # fmt: skip

    found = read_tokenizer(tmp_path, config(vocab_size=3601))

    assert found.tokenizer.token_to_id("<here>") == 3600
    assert found.tokenizer.token_to_id("<image>") is None
    assert any("left out: '<image>'" in note for note in found.notes)


def test_added_tokens_above_the_vocabulary_are_left_out(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    source_with(tmp_path, "spiece.model", trained(**T5), tokenizer_class="T5Tokenizer")
    tokenizer = read_tokenizer(tmp_path, config()).tokenizer
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    found = read_tokenizer(tmp_path, config(vocab_size=3600))

    assert found.tokenizer.token_to_id("<image>") is None
    assert any("left out: '<image>'" in note for note in found.notes)


def test_marks_are_composed_as_the_table_says_and_not_reordered(
    trained: Callable[..., Path],
) -> None:
    steps = read_sentencepiece(trained()).charsmap.steps

    def normalize(text: str) -> str:
        for step in steps:
            text = step.normalize_str(text)
        return text

    assert normalize("e\u0323\u0302") == "\u1ec7"  # the library's own gives U+1EB9
    assert normalize("\u1112\u1161\u11ab") == "\ud55c"
    assert normalize("\uff36\u0301") == "V\u0301"
    assert normalize("\u0628\u0651\u064e") == "\u0628\u0651\u064e"  # NFC would turn the two round
    assert normalize("a\u0316\u0301") == "a\u0316\u0301"  # and compose these over another


@pytest.mark.parametrize("blob", [b"\1\0\0\0", b"\4\0\0\0ab", b"\4\0\0\0" + b"\xff" * 8])
def test_a_damaged_table_of_characters_is_refused_or_empty(blob: bytes) -> None:
    try:
        found = read_charsmap(blob)
    except ValueError as error:
        assert "table of characters" in str(error)
    else:
        assert not found.singles and not found.several
