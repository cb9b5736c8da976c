"""The word-level tokenizer of the tasks whose language is a small grammar."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

PAD, UNKNOWN = "[PAD]", "[UNK]"


def word_tokenizer(words: Iterable[str], specials: Iterable[str] = ()) -> Tokenizer:
    """Return a tokenizer with one token a word and a punctuation mark, whatever its case.

    PAD is token 0, UNKNOWN is token 1 and stands for every other word, then come `specials`.
    """
    tokens = dict.fromkeys([PAD, UNKNOWN, *specials, *sorted(set(words))])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer
