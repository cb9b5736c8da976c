"""Gives a `tokenizer.json` what its class and the settings beside it say, as transformers does."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from exporter.huggingface.tokenizers.added import surround
from exporter.huggingface.tokenizers.settings import Settings, Token, text_of


def add_settled(
    tokenizer: Tokenizer,
    settings: Settings,
    named: Collection[str],
    room: int,
    without: Collection[str],
) -> list[str]:
    """Make added tokens of what the settings list or name, special if it is named.

    New ones get the next ids. Those in `without` are left out, and those for which there would be
    no id below `room`, which are returned.
    """
    there = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    listed = sorted(settings.added_tokens_decoder.items())
    found: dict[str, Token] = {token.content: token for _, token in listed}
    if settings.is_old:  # what the file says of a token counts before a list without flags
        found = {
            text: token.model_copy(update={"normalized": not token.special})
            for text, token in found.items()
            if text not in there
        }
    flags = settings.flags()
    for text in (*named, *map(text_of, settings.additional_special_tokens)):
        if text not in there:
            found.setdefault(text, flags.get(text, Token(content=text)))
        elif settings.is_old and text in named:
            found[text] = _token(there[text])
    adding, over, new = [], [], _next_id(tokenizer)
    for text, token in found.items():
        is_new = tokenizer.token_to_id(text) is None
        if text in without:
            continue
        if is_new and new >= room:
            over.append(text)
            continue
        new += is_new
        is_special = token.special or text in named or (text in there and there[text].special)
        adding.append(token.model_copy(update={"special": is_special}).added())
    tokenizer.add_tokens(adding)
    return over


def _token(added: AddedToken) -> Token:
    return Token(**{name: getattr(added, name) for name in Token.model_fields})


def _next_id(tokenizer: Tokenizer) -> int:
    """Return the id that the library gives to a token that is not in the vocabulary."""
    added = max(tokenizer.get_added_tokens_decoder(), default=-1)
    return max(added + 1, tokenizer.get_vocab_size(with_added_tokens=False))


def follow_settings(tokenizer: Tokenizer, kind: str, settings: Settings) -> None:
    """Let letters and the space in front of a text be as the settings say; if silent, as they are.

    One file may have been changed, or written, without the other. Around a text stands what the
    class `kind` puts there, if the vocabulary has it; "" for one that follows its file alone.
    """
    if not kind:
        return
    with contextlib.suppress(ValueError):
        surround(tokenizer, kind, settings)
    normalizer, cut = tokenizer.normalizer, tokenizer.pre_tokenizer
    if isinstance(normalizer, normalizers.BertNormalizer) and settings.do_lower_case is not None:
        tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=normalizer.clean_text,
            handle_chinese_chars=settings.tokenize_chinese_chars,
            strip_accents=settings.strip_accents,
            lowercase=settings.do_lower_case,
        )
    if isinstance(cut, pre_tokenizers.ByteLevel) and settings.add_prefix_space is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=settings.add_prefix_space, use_regex=cut.use_regex
        )
