"""Makes a tokenizer of a vocabulary and the codes that subword-nmt or fastBPE learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.errors import CheckpointError
from engine.json_file import read_bounded
from engine.wording import shortened
from exporter.toolkits.words import Words

CONTINUES = "@@"  # stands behind a piece that does not end its word
_ENDS = "</w>"  # in codes, behind one that does
_MAX_BYTES = 2**26

Merge = tuple[str, str]


class SubwordTokenizer(NamedTuple):
    """A tokenizer, and how many of its pieces have ids behind those of the vocabulary.

    Words become these only on the way to others, or are unknown to the model.
    """

    tokenizer: Tokenizer
    num_more: int


def read_codes(path: Path) -> list[Merge]:
    """Return which two pieces become one, the first before the others.

    Raises CheckpointError that names a line which is not two pieces, or codes of an old version.
    """
    try:
        lines = read_bounded(path, _MAX_BYTES).decode().split("\n")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    has_version = lines[0].startswith("#version:")
    rows = [line.strip("\r ").split(" ") for line in lines[has_version:] if line.strip()]
    is_old = lines[0].endswith("0.1") or not (has_version or all(len(row) == 3 for row in rows))
    if is_old:
        raise CheckpointError(
            f"{path} has no `#version: 0.2` and no counts: it was learned by a subword-nmt before "
            "0.2, whose words end otherwise; cut texts yourself and leave --bpe-codes out"
        )
    for number, row in enumerate(rows, 1 + has_version):
        if len(row) not in (2, 3) or not all(row):
            given = shortened(repr(" ".join(row)))
            raise CheckpointError(f"{path}, line {number}: {given} is not two pieces")
    return list(dict.fromkeys((row[0], row[1]) for row in rows))


def cut_by_codes(vocabulary: Words, merges: Sequence[Merge]) -> SubwordTokenizer:
    """Return the tokenizer that cuts words as `subword-nmt apply-bpe` does."""
    ids: dict[str, int] = {}  # by what codes call a word
    for word, i in vocabulary.ids.items():
        if word in vocabulary.special:
            ids[word] = i
        elif word.endswith(CONTINUES) and word != CONTINUES:
            ids[word.removesuffix(CONTINUES)] = i
        else:
            ids[word + _ENDS] = i
    made = [left + right for left, right in merges]
    needed = [piece for merge in zip(merges, made, strict=True) for piece in (*merge[0], merge[1])]
    more = [piece for piece in dict.fromkeys(needed) if piece not in ids]
    ids |= {piece: i for i, piece in enumerate(more, len(vocabulary))}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=list(merges),
            unk_token=vocabulary.unknown,
            end_of_word_suffix=_ENDS,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(_ENDS)
    return SubwordTokenizer(tokenizer, len(more))
