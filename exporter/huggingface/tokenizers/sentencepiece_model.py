"""Reads a SentencePiece model and makes the same of it with the `tokenizers` library.

Classes of transformers that run in Python, and toolkits, cut texts by SentencePiece itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from engine.json_file import read_bounded
from engine.wording import listed
from exporter.huggingface.tokenizers.charsmap import Charsmap, literal, read_charsmap

Algorithm = Literal["unigram", "bpe", "char"]

SPACE = "▁"  # stands for a space in pieces
_MAX_BYTES = 2**26
_MAX_PIECE_BYTES = 2**10
# The score a character of a piece that no text is to become, as long as there is any other way.
_NEVER = -1e6
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_ALGORITHMS: Mapping[int, Algorithm] = {1: "unigram", 2: "bpe", 4: "char"}
_WORDS = 3  # model type: a word without an id is one token, and so are several in a row


@dataclass(frozen=True)
class Piece:
    """A token of a model."""

    text: str
    score: float
    kind: int  # as in sentencepiece_model.proto

    @property
    def is_special(self) -> bool:
        """Whether it says something about a text, rather than being in it."""
        return self.kind in (_UNKNOWN, _CONTROL)

    @property
    def tells_language(self) -> bool:
        """Whether it tells a model of several languages which to write, as `>>fra<<` does."""
        return self.text.startswith(">>") and self.text.endswith("<<")


@dataclass(frozen=True)
class SentencePieceModel:
    """The effect of a SentencePiece model on a text."""

    name: str  # its file's
    pieces: tuple[Piece, ...]
    algorithm: Algorithm
    charsmap_blob: bytes
    begins_with_space: bool  # a text gets a space in front
    joins_spaces: bool  # several spaces become one, and none stays at the ends

    @cached_property
    def charsmap(self) -> Charsmap:
        """The table that replaces characters; ValueError if it is damaged."""
        try:
            return read_charsmap(self.charsmap_blob)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error

    @property
    def notes(self) -> list[str]:
        """Remarks for a person on rules that are not followed."""
        rules = self.charsmap.unfollowed
        if not rules:
            return []
        return [
            f"{self.name}: {len(rules)} of its rules for characters that come together are not "
            f"followed, such as that for {rules[0]!a}"
        ]

    def vocabulary(
        self, words: Sequence[str], unknown: str, special: Collection[str]
    ) -> tuple[list[Piece], list[str]]:
        """Return the piece of every word of another vocabulary, and a note if pieces have no word.

        No text becomes a special word, nor one that the model lacks, which is shown in texts.
        """
        known = {piece.text: piece for piece in self.pieces if not piece.is_special}
        ids = {word: i for i, word in enumerate(words)}  # a later one of two that are equal counts
        found = []
        for i, word in enumerate(words):
            piece = known.get(word) or Piece(word, 0.0, _UNUSED)
            if word == unknown:
                piece = Piece(word, 0.0, _UNKNOWN)
            elif word in special:
                piece = Piece(word, 0.0, _CONTROL)
            found.append(piece if ids[word] == i else Piece(f"{word} ({i})", 0.0, _UNUSED))
        if not (missing := [text for text in known if text not in ids]):
            return found, []
        return found, [
            f"{self.name}: {len(missing)} of its pieces are not in the vocabulary, such as "
            f"{missing[0]!a}; a text is cut into others, where the original has the unknown token"
        ]

    @property
    def has_bytes(self) -> bool:
        """Whether unknown characters are written byte by byte."""
        return any(piece.kind == _BYTE for piece in self.pieces)

    def is_searched(self, piece: Piece) -> bool:
        """Say whether a user's symbol is looked for in a text before the text is cut."""
        return piece.kind == _USER_DEFINED and self.algorithm != "unigram"


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a model file; ValueError says what is wrong with it, or what it has that we lack."""
    proto = ModelProto()
    try:
        proto.ParseFromString(read_bounded(path, _MAX_BYTES))
    except Exception as error:  # the message library's own, which is imported nowhere here
        raise ValueError(f"{path.name}: it is not a SentencePiece model") from error
    pieces = tuple(Piece(piece.piece, piece.score, piece.type) for piece in proto.pieces)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    problems = [
        name
        for name, is_there in (
            ("whole words as pieces (model type word)", trainer.model_type == _WORDS),
            (f"model type {trainer.model_type}", trainer.model_type not in (*_ALGORITHMS, _WORDS)),
            ("spaces behind words", trainer.treat_whitespace_as_suffix),
            ("spaces as they are", not normalizer.escape_whitespaces),
            ("a denormalizer", bool(proto.denormalizer_spec.precompiled_charsmap)),
            ("no unknown token", [piece.kind for piece in pieces].count(_UNKNOWN) != 1),
            ("pieces of no length", any(not piece.text for piece in pieces)),
            ("long pieces", any(len(piece.text.encode()) > _MAX_PIECE_BYTES for piece in pieces)),
        )
        if is_there
    ]
    if problems:
        raise ValueError(
            f"{path.name}: it has {listed(problems)}; supported: unigram, BPE and characters "
            "without these"
        )
    return SentencePieceModel(
        path.name,
        pieces,
        _ALGORITHMS[trainer.model_type],
        normalizer.precompiled_charsmap,
        normalizer.add_dummy_prefix,
        normalizer.remove_extra_whitespaces,
    )


def convert(
    model: SentencePieceModel,
    vocabulary: Sequence[Piece],
    added: Mapping[str, AddedToken] = {},
) -> Tokenizer:
    """Return the tokenizer of `model` whose ids are places in `vocabulary`.

    Tokens that are found in a text before it is cut are special pieces, symbols of a user, those
    that tell a language, and those in `added`, which says how. Nothing stands around a text yet.
    """
    tokenizer = Tokenizer(_algorithm(model, vocabulary))
    steps = [*model.charsmap.steps]
    if model.joins_spaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.begins_with_space:
        # The library searches symbols as a normalizer leaves them, and is not to search them with
        # a space: none stands before a symbol that is all of a text.
        symbols = [literal(p.text) for p in vocabulary if model.is_searched(p)]
        alone = rf"\A(?!(?:{'|'.join(symbols)})\z)(?=[\s\S])"
        in_front = normalizers.Replace(Regex(alone), SPACE)
        steps.append(in_front if symbols else normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="never",
        split=not any(SPACE in piece.text[1:] for piece in vocabulary),
    )
    strips = model.begins_with_space or model.joins_spaces
    tokenizer.decoder = _decoder(model, vocabulary, strips=strips)
    tokenizer.add_tokens(
        [
            added.get(piece.text) or _added(piece)
            for piece in vocabulary
            if piece.text in added
            or piece.is_special
            or piece.tells_language
            or model.is_searched(piece)
        ]
    )
    return tokenizer


def put_around(tokenizer: Tokenizer, single: Sequence[str], pair: Sequence[str]) -> None:
    """Let a text `$A`, and a pair of it and `$B`, stand among tokens of the vocabulary."""
    names = {name for name in (*single, *pair) if name not in ("$A", "$B")}
    ids = {name: tokenizer.token_to_id(name) for name in sorted(names)}
    if missing := [name for name, found in ids.items() if found is None]:
        raise ValueError(f"its vocabulary lacks {', '.join(map(repr, missing))}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=list(single), pair=list(pair), special_tokens=list(ids.items())
    )


def _added(piece: Piece) -> AddedToken:
    """Return how a piece is looked for.

    A user's symbol is found in the normalized text, unless nothing would be left of it there.
    """
    is_kept = not any(map(str.isspace, piece.text))
    is_normalized = is_kept and not piece.is_special and not piece.tells_language
    return AddedToken(piece.text, special=piece.is_special, normalized=is_normalized)


def _algorithm(model: SentencePieceModel, vocabulary: Sequence[Piece]) -> models.Model:
    unknown = next((i for i, piece in enumerate(vocabulary) if piece.kind == _UNKNOWN), None)
    if unknown is None:
        raise ValueError("its class has another token where the model has the unknown one")
    if model.algorithm != "bpe":  # a text has one way to be cut into characters
        scored = [(piece.text, _score(piece, model)) for piece in vocabulary]
        return models.Unigram(scored, unknown, model.has_bytes)
    ids = {piece.text: i for i, piece in enumerate(vocabulary)}
    return models.BPE(
        vocab=ids,
        merges=_merges(vocabulary, ids),
        unk_token=vocabulary[unknown].text,
        fuse_unk=True,
        byte_fallback=model.has_bytes,
    )


def _score(piece: Piece, model: SentencePieceModel) -> float:
    if piece.kind not in (_NORMAL, _USER_DEFINED):
        return _NEVER * len(piece.text) + len(piece.text) - 1  # rather one piece than several
    if piece.kind == _USER_DEFINED:  # as SentencePiece does it: likelier than all of its parts
        best = max(other.score for other in model.pieces if other.kind == _NORMAL)
        return len(piece.text.encode()) * best - 0.1
    return piece.score


def _merges(vocabulary: Sequence[Piece], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs that become a piece, the best piece first; its longest beginning first."""
    normal = {piece.text for piece in vocabulary if piece.kind == _NORMAL}
    found = [
        (-piece.score, -cut, piece.text[:cut], piece.text[cut:])
        for piece in vocabulary
        if piece.kind == _NORMAL
        for cut in range(1, len(piece.text))
        if piece.text[:cut] in normal and piece.text[cut:] in normal
    ]
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def _decoder(
    model: SentencePieceModel, vocabulary: Sequence[Piece], *, strips: bool
) -> decoders.Decoder:
    """Return what makes a text of tokens; those that no text becomes become none, plain or not."""
    controls = {piece.text for piece in model.pieces if piece.kind == _CONTROL}
    silent = [p.text for p in vocabulary if p.kind == _UNUSED and p.text in controls]
    nothing = [decoders.Replace(Regex(rf"\A{literal(text)}\z"), "") for text in silent]
    steps: list[decoders.Decoder] = [*nothing, decoders.Replace(SPACE, " ")]
    if model.has_bytes:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if strips:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
