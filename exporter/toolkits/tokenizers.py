"""Makes the tokenizers of a source and of what is written, of vocabularies and what cuts words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from engine.errors import CheckpointError
from engine.text.tokenizer_file import parse_tokenizer
from engine.wording import listed
from exporter.checkpoint import TextFiles
from exporter.huggingface.tokenizers import ImportedTokenizer
from exporter.huggingface.tokenizers.sentencepiece_model import (
    SPACE,
    convert,
    put_around,
    read_sentencepiece,
)
from exporter.toolkits.subword_nmt import CONTINUES, Merge, cut_by_codes, read_codes
from exporter.toolkits.words import Words

CODES_NAMES = ("bpe.codes", "bpecodes", "codes.bpe", "codes", "code")
_JOINER = "￭"  # OpenNMT's tokenizer: a piece stands without a space on this side


@dataclass(frozen=True)
class Cutters:
    """The files that say how words are cut: codes of subword-nmt, or models of SentencePiece."""

    codes: Path | None = None
    models: tuple[Path, ...] = ()  # one for sources and one for targets, or one for both


@dataclass(frozen=True)
class Cut:
    """The tokenizer of a side."""

    text: ImportedTokenizer
    num_more: int = 0  # ids of sources behind their vocabulary, all of which mean the unknown word


def find_cutters(directory: Path, codes: Path | None) -> Cutters:
    """Return what lies beside a checkpoint, unless `codes` are given.

    Raises CheckpointError where there are more files than can be told apart.
    """
    if codes is not None:
        return Cutters(codes)
    there = [directory / name for name in CODES_NAMES if (directory / name).is_file()]
    pieces = sorted(directory.glob("*.model"), key=lambda path: ("source" not in path.name, path))
    named = [path for path in pieces if "source" in path.name or "target" in path.name]
    if len(there) + bool(pieces) > 1 or (len(pieces) > 1 and len(named) != len(pieces)):
        raise CheckpointError(
            f"{directory} has {listed([path.name for path in (*there, *pieces)])}, and it is not "
            "clear which of them cuts words; leave one there, or source.model and target.model"
        )
    return Cutters(there[0] if there else None, tuple(pieces))


def make_tokenizers(source: Words, target: Words, cutters: Cutters) -> Cut:
    """Return the tokenizers of a model, and what a person should know of them."""
    if cutters.models:
        return _of_pieces(source, target, cutters.models)
    if cutters.codes is not None:
        return _of_codes(source, target, read_codes(cutters.codes))
    mark = _mark(source)
    marked = "" if mark is None else f", in pieces marked with {mark}"
    note = (
        "nothing beside it cuts words: texts are cut at spaces, so give them as the model was "
        f"trained on them{marked}; codes of subword-nmt are read from --bpe-codes FILE, "
        "a SentencePiece model from FILE.model in the directory"
    )
    return _result(_of_words(source), _of_words(target), source, target, [note])


def _of_codes(source: Words, target: Words, merges: Sequence[Merge]) -> Cut:
    made, made_target = cut_by_codes(source, merges), cut_by_codes(target, merges)
    notes = ["words are cut by codes, texts into words at spaces: punctuation as in training"]
    if made.num_more:
        notes.append(
            f"{made.num_more} pieces of the codes are not in the vocabulary: a word that is cut "
            "into them is unknown there, and sources have an embedding of their own"
        )
    written = made_target.tokenizer
    if made_target.num_more:
        written = _of_words(target)
        notes.append("texts to be scored or continued are cut at spaces: give them as pieces")
    else:
        _finish(written, target)
    _finish(made.tokenizer, source)
    return _result(made.tokenizer, written, source, target, notes, made.num_more)


def _of_pieces(source: Words, target: Words, paths: Sequence[Path]) -> Cut:
    notes: dict[str, None] = {}
    made = []
    for words, path in ((source, paths[0]), (target, paths[-1])):
        try:
            model = read_sentencepiece(path)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        pieces, lacking = model.vocabulary(words.words, words.unknown, words.special)
        notes |= dict.fromkeys([*model.notes, *lacking])
        made.append(convert(model, pieces))
        _end(made[-1], words)
    return _result(made[0], made[1], source, target, list(notes))


def _of_words(words: Words) -> Tokenizer:
    """Return what cuts a text at spaces, and joins pieces by the marks that they have."""
    tokenizer = Tokenizer(models.WordLevel(words.ids, words.unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    mark = _mark(words)
    if mark is not None:
        steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.Fuse()]
        if mark != SPACE:
            joined = f"{CONTINUES}(?: |\\z)" if mark == CONTINUES else f"(?: ?{_JOINER} ?)"
            steps = [decoders.Replace(Regex(r"\A"), " "), decoders.Fuse()]
            steps.append(decoders.Replace(Regex(joined), ""))
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    _finish(tokenizer, words)
    return tokenizer


def _finish(tokenizer: Tokenizer, words: Words) -> None:
    tokenizer.add_tokens(
        [AddedToken(word, special=True, single_word=True) for word in words.special]
    )
    _end(tokenizer, words)


def _end(tokenizer: Tokenizer, words: Words) -> None:
    if words.end:
        put_around(tokenizer, ["$A", words.end], ["$A", "$B", words.end])


def _mark(words: Words) -> str | None:
    """Return what tells where words were cut, if anything does."""
    if any(word.endswith(CONTINUES) and word != CONTINUES for word in words.words):
        return CONTINUES
    for mark in (SPACE, _JOINER):
        if any(mark in word for word in words.words):
            return mark
    return None


def _result(
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    source: Words,
    target: Words,
    notes: Sequence[str],
    num_more: int = 0,
) -> Cut:
    checked = _checked(source_tokenizer, len(source) + num_more)
    written = _checked(target_tokenizer, len(target))
    is_same = checked.to_str() == written.to_str()
    files = TextFiles(None if is_same else written)
    return Cut(ImportedTokenizer(checked, files, notes=tuple(notes)), num_more)


def _checked(tokenizer: Tokenizer, room: int) -> Tokenizer:
    try:
        return parse_tokenizer(tokenizer.to_str().encode(), room).tokenizer
    except ValueError as error:
        raise CheckpointError(f"its vocabulary makes no tokenizer: {error}") from error
