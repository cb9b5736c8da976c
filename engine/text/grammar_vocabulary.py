"""A vocabulary as grammars of the text read it: every token as the bytes that it adds."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import CapabilityNotSupported
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GrammarVocabulary:
    """The bytes of each token behind another one; b"" for one that a text leaves out."""

    tokens: tuple[bytes, ...]
    drops_first_space: bool  # a text lacks the space that its first token begins with


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> GrammarVocabulary:
    """Return the bytes of all tokens.

    Raises CapabilityNotSupported if what a token adds depends on more than whether it is the first.
    """
    tokens, plain = [b""] * vocab_size, []
    for token_id in range(vocab_size):
        token = tokenizer.visible_token(token_id)
        if token is not None:
            tokens[token_id] = tokenizer.token_bytes(token_id)
            if not tokenizer.is_byte_level and not tokenizer.is_fallback_byte(token):
                plain.append(token_id)
    drops_first_space = tokenizer.drops_first_space or _drops_first_space(tokenizer, plain, tokens)
    return GrammarVocabulary(tuple(tokens), drops_first_space)


def _drops_first_space(tokenizer: Tokenizer, plain: list[int], tokens: list[bytes]) -> bool:
    """Say whether a token that comes first loses its space; refuse if any changes otherwise."""
    drops = False
    contexts = [(i, tokenizer.decode([i])) for i in (*plain[:1], *plain[-1:])]
    for token_id in plain:
        first, added = tokenizer.decode([token_id]), tokens[token_id].decode()
        for context, before in contexts:
            if tokenizer.decode([context, token_id]) != before + added:
                raise _unsupported(f"the text of token {token_id} depends on those around it")
        if first != added:
            drops = True
            if first != added.removeprefix(" "):
                raise _unsupported(f"token {token_id} is {first!r} at the start, else {added!r}")
    return drops


def _unsupported(why: str) -> CapabilityNotSupported:
    return CapabilityNotSupported(
        f"the tokenizer of this model cannot follow a constraint: {why}; leave the constraint out",
        ("decoding.constraint",),
    )
