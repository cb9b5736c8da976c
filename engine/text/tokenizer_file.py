"""Reads a `tokenizer.json`, and refuses what its model has no room for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import tokenizers
from pydantic import BaseModel, ConfigDict, ValidationError

from engine.json_file import parse_object, read_bounded
from engine.wording import problems_of, shortened

_MAX_GROWTH = 2**10  # a text's, by additions around it or replacements of its characters
MAX_BYTES = 2**27  # the largest that are known have a quarter of it
MAX_TOKEN_CHARS = 2**12  # the library keeps pieces as trees, as deep as they are long
_RARE = "\N{CUNEIFORM SIGN AN}"  # a letter, so that no normalizer leaves it out, in no vocabulary


class Decoder(BaseModel):
    """How tokens become text, as far as it has to be known besides what the library does."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    type: str
    decoders: list[Decoder] = []  # a Sequence's
    content: Any = None  # what a Strip takes away: so often at the start, so often at the end
    start: Any = None
    stop: Any = None

    @property
    def steps(self) -> list[Decoder]:
        """Its decoders, in their order; itself, if it is no Sequence."""
        return self.decoders if self.type == "Sequence" else [self]

    @property
    def takes_first_space(self) -> bool:
        """Whether all it does is to take one space off the beginning of a text."""
        return (self.type, self.content, self.start, self.stop) == ("Strip", " ", 1, 0)


class TokenizerFile(NamedTuple):
    """A tokenizer that neither cuts texts short nor pads them, whatever its file says."""

    tokenizer: tokenizers.Tokenizer
    decoder: Decoder | None
    vocab_size: int  # the largest id and one; ids may have gaps
    unknown: str | int | None  # the token, or its id, of what the vocabulary does not have
    cuts_left: bool = False  # its file cuts long texts, and keeps their ends


def read_tokenizer_file(
    path: str | os.PathLike[str], vocab_size: int | None = None
) -> TokenizerFile:
    """Read a tokenizer whose ids are below `vocab_size`; None: whatever they are.

    Raises ValueError, saying what is wrong, in a time that `vocab_size` and the size of the file
    bound, and OSError.
    """
    return parse_tokenizer(read_bounded(path, MAX_BYTES), vocab_size)


def parse_tokenizer(raw: bytes, vocab_size: int | None = None) -> TokenizerFile:
    """Return the tokenizer that the bytes of a `tokenizer.json` are; ValueError as above."""
    content = parse_object(raw)
    model, decoder = content.get("model"), content.get("decoder")
    try:
        read_decoder = None if decoder is None else Decoder.model_validate(decoder)
    except ValidationError as error:
        raise ValueError(f"its decoder: {problems_of(error, 'decoder')}") from error
    if vocab_size is not None:
        _check_room(content, vocab_size)
    _check_growth(content)
    _check_pieces(model)
    tokenizer, cuts_left = _build(raw)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if vocab_size is not None and size > vocab_size:
        raise ValueError(
            f"it has token ids up to {size - 1}, the model has a vocabulary of {vocab_size}"
        )
    unknown = model.get("unk_token", model.get("unk_id")) if isinstance(model, dict) else None
    unknown = unknown if isinstance(unknown, str | int) else None
    return TokenizerFile(tokenizer, read_decoder, size, unknown, cuts_left)


def _check_room(content: dict[str, Any], vocab_size: int) -> None:
    """Count before the library looks at each of a million tokens."""
    model = content.get("model")
    for name, tokens in (
        ("added tokens", content.get("added_tokens")),
        ("tokens", model.get("vocab") if isinstance(model, dict) else None),
    ):
        if isinstance(tokens, list | dict) and len(tokens) > vocab_size:
            raise ValueError(
                f"it has {len(tokens)} {name}, the model has a vocabulary of {vocab_size}"
            )


def _check_pieces(model: object) -> None:
    """Refuse a piece so long that the library would end the process."""
    pieces = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(pieces, list):  # others are kept by their text
        return
    found = (one[0] for one in pieces if isinstance(one, list) and one)
    longest = max((len(text) for text in found if isinstance(text, str)), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise ValueError(f"it has a token of {longest:,} characters, more than {MAX_TOKEN_CHARS:,}")


def _check_growth(content: dict[str, Any]) -> None:
    """Refuse what makes a gigabyte of the shortest text; the library would do it."""
    added = sum(_num_pieces(one) for one in _steps(content.get("post_processor"), "processors"))
    if added > _MAX_GROWTH:
        raise ValueError(
            f"its post_processor adds {added:,} tokens to a text, more than {_MAX_GROWTH:,}"
        )
    for part, inner in (("normalizer", "normalizers"), ("decoder", "decoders")):
        growth = 1
        for one in _steps(content.get(part), inner):
            for text in (one.get("content"), one.get("prepend")):
                growth *= max(1, len(text)) if isinstance(text, str) else 1
            if growth > _MAX_GROWTH:
                raise ValueError(f"its {part} makes a text more than {_MAX_GROWTH:,} times as long")


def _steps(part: object, inner: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of a part, whose sequences lie under `inner`."""
    waiting = [part]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            if isinstance(parts := one.get(inner), list):
                waiting += parts


def _num_pieces(processor: dict[str, Any]) -> int:
    """Return how many tokens and texts the templates of a post-processor name."""
    special = processor.get("special_tokens")
    sizes = {
        name: len(ids)
        for name, token in (special.items() if isinstance(special, dict) else ())
        if isinstance(token, dict) and isinstance(ids := token.get("ids"), list)
    }
    return sum(
        max(1, sizes.get(str(token.get("id")), 1)) if isinstance(token, dict) else 1
        for template in (processor.get("single"), processor.get("pair"))
        for piece in (template if isinstance(template, list) else ())
        for token in [piece.get("SpecialToken") if isinstance(piece, dict) else None]
    )


def _build(raw: bytes) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the tokenizer, and whether its file would cut the beginning of a text."""
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        cuts_left = (tokenizer.truncation or {}).get("direction") == "left"
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("")  # fails where special tokens are to be added that are not there
        tokenizer.encode("", "")
        tokenizer.encode(_RARE)  # fails where unknown words have a token that is not there
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises Exception itself, and panics, which are not
        raise ValueError(shortened(error)) from error
    return tokenizer, cuts_left
