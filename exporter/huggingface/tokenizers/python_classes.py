"""Makes tokenizers of the classes of transformers that run in Python: Marian, M2M-100, ByT5."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from exporter.huggingface.tokenizers.charsmap import Branch, one_of
from exporter.huggingface.tokenizers.sentencepiece_model import (
    convert,
    put_around,
    read_sentencepiece,
)

_UNKNOWN = "\uffff"  # in no vocabulary
_MOST_CHARS = 64  # longest piece that is looked for among unknown characters


class Made(NamedTuple):
    """A tokenizer, and what a person should know of it."""

    tokenizer: Tokenizer
    notes: Sequence[str] = ()


def convert_python(original: Any, directory: Path) -> tuple[Made, Made | None]:
    """Return the tokenizer of sources, and that of targets where it is another.

    Raises ValueError for a class that has no counterpart.
    """
    kind = type(original).__name__
    ids = getattr(original, "encoder", {})
    if kind == "MarianTokenizer":
        own = original.target_encoder if original.separate_vocabs else ids
        source, target = (directory / Path(name).name for name in original.spm_files)
        return _by_pieces(original, source, ids), _by_pieces(original, target, own)
    if kind == "M2M100Tokenizer":
        path = directory / Path(original.spm_file).name
        return _by_pieces(original, path, {**ids, **original.lang_token_to_id}), None
    if kind == "ByT5Tokenizer":
        return _by_bytes(original), None
    raise ValueError(
        f"its {kind} of transformers runs in Python alone; supported of these are Marian, M2M-100 "
        "and ByT5"
    )


def _by_pieces(original: Any, path: Path, ids: Mapping[str, int]) -> Made:
    """Return a SentencePiece model with the ids of a vocabulary; what it has not is in no text."""
    texts = {place: text for text, place in ids.items()}
    if {*texts} != {*range(len(ids))} or any(type(place) is not int for place in texts):
        raise ValueError("the ids of vocab.json are not 0, 1, 2 and so on, each once")
    if original.unk_token not in ids:
        raise ValueError(f"vocab.json has no {original.unk_token}")
    languages = getattr(original, "lang_token_to_id", ())
    added = {text: AddedToken(text, special=True) for text in languages}
    added |= {token.content: token for token in _added(original)}
    model = read_sentencepiece(path)
    words = [text for _, text in sorted(texts.items())]
    pieces, notes = model.vocabulary(words, original.unk_token, added)
    tokenizer = convert(model, pieces, added=added)
    if not model.has_bytes:
        known = [piece.text for piece in model.pieces if not piece.is_special]
        tokenizer.normalizer = normalizers.Sequence(
            [tokenizer.normalizer, _join_unknown(known, ids)]
        )
    tokenizer.add_tokens(_added(original))
    _surround(tokenizer, original)
    return Made(tokenizer, [*model.notes, *notes])


def _join_unknown(known: Collection[str], ids: Collection[str]) -> normalizers.Normalizer:
    """Return what makes one character of several in a row that the model lacks.

    SentencePiece takes them for one piece, which may be one of the other model. By themselves,
    each would be found among the pieces of the other model.
    """
    letters = {char for text in known for char in text}
    other = f"[^{one_of(letters)[1:]}"
    short = (text for text in ids if 1 < len(text) <= _MOST_CHARS)
    whole = [text for text in short if letters.isdisjoint(text)]
    kept = f"(?!{Branch.of(whole).pattern()}(?!{other}))" if whole else ""
    return normalizers.Replace(Regex(f"(?={other}{{2}})(?<!{other}){kept}{other}+"), _UNKNOWN)


def _by_bytes(original: Any) -> Made:
    """Return a tokenizer whose ids are bytes, behind the first special tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    added = _added(original)
    ids = {token.content: i for i, token in enumerate(added[: original.offset])}
    ids |= {char: byte + original.offset for byte, char in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added)
    _surround(tokenizer, original)
    return Made(tokenizer)


def _added(original: Any) -> list[AddedToken]:
    """Return the added tokens by id; they are found in a text before it is normalized."""
    special = set(original.all_special_tokens)
    return [
        AddedToken(
            token.content,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word,
            normalized=False,
            special=token.special or token.content in special,
        )
        for _, token in sorted(original.added_tokens_decoder.items())
    ]


def _surround(tokenizer: Tokenizer, original: Any) -> None:
    """Put around texts the tokens that the class puts there."""
    names = {-1: "$A", -2: "$B"}
    single, pair = (
        [names.get(i) or str(tokenizer.id_to_token(i)) for i in ids]
        for ids in (
            original.build_inputs_with_special_tokens([-1]),
            original.build_inputs_with_special_tokens([-1], [-2]),
        )
    )
    put_around(tokenizer, single, pair)
