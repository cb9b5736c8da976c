"""Subword tokenizers trained on a person's own texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

PAD = "[PAD]"


def train_subwords(
    texts: Iterable[str], vocab_size: int, specials: Sequence[str], *, words_only: bool = False
) -> Tokenizer:
    """Return a byte-level BPE of at most `vocab_size` tokens, PAD and `specials` the first of them.

    It encodes any text, and gives it back with characters in their composed form (NFC), but for
    white space at both ends. With `words_only` a space parts words, and nothing else does.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    # A word has the same tokens at the beginning of a text as inside of it.
    if words_only:
        by_words = [pre_tokenizers.WhitespaceSplit()]
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*by_words, pieces])
    else:
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=True)
        pairs = pre_tokenizers.Split(Regex("Ġ?[0-9]{1,2}"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, pairs])
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[PAD, *specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def frame(tokenizer: Tokenizer, template: str, specials: Sequence[str]) -> None:
    """Put special tokens around every text, as in `[CLS] $A [SEP]`."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in specials],
    )
