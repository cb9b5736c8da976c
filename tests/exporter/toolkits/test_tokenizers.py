"""Texts of a toolkit's model are cut as they were in training, and joined again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer

from engine.errors import CheckpointError
from engine.text.tokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer as ServedTokenizer
from exporter.checkpoint import load_checkpoint
from exporter.toolkits import import_toolkit_checkpoint
from exporter.toolkits.subword_nmt import cut_by_codes, read_codes
from exporter.toolkits.tokenizers import Cutters, find_cutters, make_tokenizers
from exporter.toolkits.words import Words
from tests.exporter.toolkits.sources import save_fairseq

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
CODES = ["l o", "lo w</w>", "e r</w>", "n e", "ne w", "w er</w>", "new est</w>", "e s"]
PIECES = ["low", "lo@@", "er", "new@@", "wer", "e@@", "s@@", "t", "l@@", "w@@", "n@@"]


def apply_codes(word: str, codes: list[str]) -> list[str]:
    """Cut a word as `subword_nmt.apply_bpe.encode` does (version 0.2)."""
    pieces = [*word[:-1], f"{word[-1]}</w>"]
    ranks = {tuple(line.split()): i for i, line in reversed(list(enumerate(codes)))}
    while known := [pair for pair in itertools.pairwise(pieces) if pair in ranks]:
        best, merged, i = min(known, key=lambda pair: ranks[pair]), [], 0
        while i < len(pieces):
            is_pair = tuple(pieces[i : i + 2]) == best
            merged.append("".join(pieces[i : i + 1 + is_pair]))
            i += 1 + is_pair
        pieces = merged
    return [piece.removesuffix("</w>") if i == len(pieces) - 1 else f"{piece}@@"
            for i, piece in enumerate(pieces)]  # fmt: skip


@pytest.mark.parametrize("header", ["#version: 0.2", None])
def test_words_are_cut_as_subword_nmt_does(header: str | None, tmp_path: Path) -> None:
    lines = [header, *CODES] if header else [f"{line} {i + 3}" for i, line in enumerate(CODES)]
    (tmp_path / "bpe.codes").write_text("\n".join(lines) + "\n")
    words = Words((*SPECIAL, *PIECES), "<unk>", SPECIAL)

    made = cut_by_codes(words, read_codes(tmp_path / "bpe.codes"))

    for text in ("low lower newer new  est", "newest lowlow é lo es", "wer t ll", "x"):
        expected = [
            words.ids.get(piece, 3) for word in text.split() for piece in apply_codes(word, CODES)
        ]
        found = made.tokenizer.encode(text).ids
        assert [i if i < len(words) else 3 for i in found] == expected, text


def test_a_piece_that_only_the_codes_have_is_the_unknown_word_to_the_model(tmp_path: Path) -> None:
    source = save_fairseq(tmp_path / "source", share_all_embeddings=True)
    size = len((tmp_path / "source" / "dict.de.txt").read_text().splitlines())
    pieces = [*PIECES, *(f"x{i}" for i in range(size - len(PIECES)))]
    for language in ("de", "en"):
        lines = "".join(f"{piece} 1\n" for piece in pieces)
        (tmp_path / "source" / f"dict.{language}.txt").write_text(lines)
    codes = tmp_path / "learned"
    codes.write_text("\n".join(["#version: 0.2", *CODES]))

    imported = import_toolkit_checkpoint(source.path, tmp_path / "checkpoint", codes=codes)

    checkpoint = load_checkpoint(tmp_path / "checkpoint")
    assert checkpoint.tokenizer is not None and checkpoint.target_tokenizer is not None
    ids = checkpoint.tokenizer.encode("lower newest").ids
    table = checkpoint.model.state_dict()["source_embeddings.token.weight"]
    assert [i for i in ids if i >= size + 4], "newest is not a word of the dictionary"
    for i in ids:
        stored = source.weights["encoder.embed_tokens.weight"][i if i < size + 4 else 3]
        assert table[i].equal(stored)
    assert any("pieces of the codes are not in the vocabulary" in one for one in imported.notes)
    assert checkpoint.target_tokenizer.decode([5, 6, 4, 7]) == "loer low new"


def test_pieces_are_joined_by_their_marks_as_they_come(tmp_path: Path) -> None:
    vocabularies = {
        "plain": (["a", "b", ","], "a b ,"),
        "subword-nmt": (["th@@", "e", "cat", "s@@"], "the cat s"),
        "sentencepiece": (["▁th", "e", "▁cat", "s"], "the cats"),
        "joiner": (["un￭", "do", "￭,", "it"], "undo, it"),
    }
    for name, (pieces, expected) in vocabularies.items():
        words = Words((*SPECIAL, *pieces), "<unk>", SPECIAL, "</s>")
        made = make_tokenizers(words, words, Cutters()).text
        assert made.tokenizer is not None and made.files.target_tokenizer is None
        ids = made.tokenizer.encode(" ".join(pieces)).ids

        assert ids == [*range(4, 4 + len(pieces)), 2]
        assert made.tokenizer.decode(ids) == expected
        assert streamed(made.tokenizer, ids, tmp_path / f"{name}.json") == expected
        assert any("give them as the model was trained on them" in note for note in made.notes)


def streamed(tokenizer: Tokenizer, ids: list[int], path: Path) -> str:
    tokenizer.save(str(path))
    text = Detokenizer(ServedTokenizer(path))
    return "".join(text.push([i]).text for i in ids) + text.finish().text


def test_a_sentencepiece_model_cuts_texts_into_the_words_of_the_vocabulary(tmp_path: Path) -> None:
    lines = ["the lower the newer", "a new low for the wide", "wider and newer, lower!"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=22,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (tmp_path / "spm.vocab").unlink()
    original = sentencepiece.SentencePieceProcessor(str(tmp_path / "spm.model"))
    pieces = [original.id_to_piece(i) for i in range(3, 22)][::-1]
    words = Words((*SPECIAL, *pieces), "<unk>", SPECIAL, "</s>")

    made = make_tokenizers(words, words, find_cutters(tmp_path, None)).text

    assert made.tokenizer is not None and not made.notes
    for text in ("the newer, wider low", "and a lower new!", "é the"):
        found = made.tokenizer.encode(text).ids
        wanted = [words.ids.get(piece, 3) for piece in original.encode(text, out_type=str)]
        assert found == [*wanted, 2]
        assert 3 in found or made.tokenizer.decode(found) == text


def test_two_files_that_cut_words_are_named(tmp_path: Path) -> None:
    for name in ("bpe.codes", "spm.model"):
        (tmp_path / name).touch()

    with pytest.raises(CheckpointError, match=r"has bpe\.codes, spm\.model, and it is not clear"):
        find_cutters(tmp_path, None)
    assert find_cutters(tmp_path, tmp_path / "x").codes == tmp_path / "x"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("e s\nes t\n", "no `#version: 0.2`"),
        ("#version: 0.1\ne s\n", "no `#version: 0.2`"),
        ("#version: 0.2\ne s\nest\n", "line 3: 'est' is not two pieces"),
    ],
)
def test_wrong_codes_are_named(content: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "bpe.codes").write_text(content)

    with pytest.raises(CheckpointError) as error:
        read_codes(tmp_path / "bpe.codes")

    assert named in str(error.value)
