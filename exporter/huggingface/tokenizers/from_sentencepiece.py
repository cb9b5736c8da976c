"""Makes tokenizers of the SentencePiece files of an original."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from exporter.huggingface.tokenizers.added import add_tokens, put_around, surround
from exporter.huggingface.tokenizers.byte_level import VOCABULARY_NAME, read_vocabulary
from exporter.huggingface.tokenizers.layouts import SENTENCEPIECE, Given, Layout, by_vocabulary
from exporter.huggingface.tokenizers.sentencepiece_model import (
    Piece,
    SentencePieceModel,
    convert,
    read_sentencepiece,
)
from exporter.huggingface.tokenizers.settings import Settings, Token
from exporter.huggingface.tokenizers.translation import m2m_languages

MODEL_NAMES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
MARIAN_NAMES = ("source.spm", "target.spm")
TARGET_VOCABULARY_NAME = "target_vocab.json"


class Made(NamedTuple):
    """A tokenizer, and what to know of it."""

    tokenizer: Tokenizer
    notes: list[str]
    cuts_left: bool = False  # its file cuts long texts, and keeps their ends
    over: Sequence[str] = ()  # added tokens of its file that the model has no room for


def read_model(path: Path) -> SentencePieceModel:
    """Read a model; ValueError names its file."""
    try:
        return read_sentencepiece(path)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def find_model(directory: Path) -> Path | None:
    """Return the SentencePiece model of a directory, if it has one under a usual name."""
    found = [directory / name for name in MODEL_NAMES if (directory / name).is_file()]
    return found[0] if found else None


def read_pieces(path: Path, kind: str, settings: Settings, room: int) -> Made:
    """Return the tokenizer of a model whose class has a layout."""
    model = read_model(path)
    layout = SENTENCEPIECE[kind](Given(model, settings, room))
    notes = [f"{path.name}: {note}" for note in layout.notes]
    made = build_tokenizer(model, layout, settings, [*unfollowed(model, path), *notes])
    surround(made.tokenizer, kind, settings)
    return made


def read_m2m(path: Path, settings: Settings) -> Made:
    """Return the tokenizer of an M2M-100: ids of `vocab.json`, then languages."""
    model = read_model(path)
    ids = read_vocabulary(path.parent / VOCABULARY_NAME)
    pieces = by_vocabulary(model, ids, ("<s>", "</s>", "<pad>"))
    names = [f"__{name}__" for name in m2m_languages(settings)]
    notes = [*unfollowed(model, path), *_without_ids(model, pieces, path)]
    layout = Layout([*pieces, *map(Piece.control, names)])
    return build_tokenizer(model, layout, settings, notes)


def read_marian(directory: Path, settings: Settings) -> tuple[Made, Made]:
    """Return the tokenizers of sources and of targets of a Marian model."""
    own = TARGET_VOCABULARY_NAME if settings.separate_vocabs else VOCABULARY_NAME
    source_path, target_path = (directory / name for name in MARIAN_NAMES)
    return (
        _read_marian(source_path, directory / VOCABULARY_NAME, settings),
        _read_marian(target_path, directory / own, settings),
    )


def _read_marian(path: Path, vocabulary: Path, settings: Settings) -> Made:
    model = read_model(path)
    pieces = by_vocabulary(model, read_vocabulary(vocabulary), ("</s>", "<pad>"))
    notes = [*unfollowed(model, path), *_without_ids(model, pieces, path)]
    layout = Layout(pieces, after=["</s>"])
    return build_tokenizer(model, layout, settings, notes)


def build_tokenizer(
    model: SentencePieceModel, layout: Layout, settings: Settings, notes: list[str]
) -> Made:
    tokenizer = convert(model, layout.vocabulary, prefix=layout.prefix)
    known = [
        _token(piece, layout)
        for piece in layout.vocabulary
        if piece.is_special or model.is_searched(piece) or _is_target_language(piece)
    ]
    add_tokens(tokenizer, known, settings)
    put_around(tokenizer, layout.before, layout.after, pair=layout.pair)
    return Made(tokenizer, notes)


def _token(piece: Piece, layout: Layout) -> Token:
    token = Token(content=piece.text, special=piece.is_special)
    if piece.text == "<mask>" and layout.strips_mask:
        return token.model_copy(update={"lstrip": True})
    # A user's symbol is found in the normalized text, unless nothing would be left of it there.
    is_symbol = not piece.is_special and not _is_target_language(piece)
    is_kept = not any(map(str.isspace, piece.text))
    return token.model_copy(update={"normalized": is_symbol and is_kept})


def _is_target_language(piece: Piece) -> bool:
    """Say whether a token tells a Marian model of several languages which to write."""
    return piece.text.startswith(">>") and piece.text.endswith("<<")


def unfollowed(model: SentencePieceModel, path: Path) -> list[str]:
    rules = model.charsmap.unfollowed
    if not rules:
        return []
    return [
        f"{path.name}: {len(rules)} of its rules for characters that come together are not "
        f"followed, such as that for {rules[0]!a}"
    ]


def _without_ids(model: SentencePieceModel, pieces: Sequence[Piece], path: Path) -> list[str]:
    there = {piece.text for piece in pieces}
    missing = [piece.text for piece in model.pieces if piece.text not in there]
    missing = [text for text in missing if text not in ("<s>", "</s>", "<unk>", "<pad>")]
    if not missing:
        return []
    return [
        f"{path.name}: {len(missing)} of its pieces have no id in {VOCABULARY_NAME}, such as "
        f"{missing[0]!a}; a text is cut into others, where transformers gives the unknown token"
    ]
