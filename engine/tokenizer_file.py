"""Reads a `tokenizer.json`, and refuses what its model has no room for."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import tokenizers
from pydantic import BaseModel, ConfigDict, ValidationError

from engine.json_file import parse_object, read_bounded
from engine.wording import problems_of, shortened

_MAX_BYTES = 2**27  # the largest that are known have a quarter of it


class Decoder(BaseModel):
    """How tokens become text, as far as it has to be known besides what the library does."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    type: str
    decoders: list[Decoder] = []  # of a Sequence


class TokenizerFile(NamedTuple):
    """A tokenizer that neither cuts texts short nor pads them, whatever its file says."""

    tokenizer: tokenizers.Tokenizer
    decoder: Decoder | None
    vocab_size: int  # the largest id and one; ids may have gaps


def read_tokenizer_file(
    path: str | os.PathLike[str], vocab_size: int | None = None
) -> TokenizerFile:
    """Read a tokenizer whose ids are below `vocab_size`; None: whatever they are.

    Raises ValueError, saying what is wrong, in a time that `vocab_size` and the size of the file
    bound, and OSError.
    """
    raw = read_bounded(path, _MAX_BYTES)
    content = parse_object(raw)
    decoder = _read_decoder(content.get("decoder"))
    if vocab_size is not None:
        _check_room(content, vocab_size)
    tokenizer = _build(raw)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if vocab_size is not None and size > vocab_size:
        raise ValueError(
            f"it has token ids up to {size - 1}, the model has a vocabulary of {vocab_size}"
        )
    return TokenizerFile(tokenizer, decoder, size)


def _read_decoder(content: object) -> Decoder | None:
    try:
        return None if content is None else Decoder.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"its decoder: {problems_of(error, 'decoder')}") from error


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


def _build(raw: bytes) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("")  # fails where special tokens are to be added that are not there
        tokenizer.encode("", "")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises Exception itself, and panics, which are not
        raise ValueError(shortened(error)) from error
    return tokenizer
