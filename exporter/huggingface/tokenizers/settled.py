"""Gives a `tokenizer.json` what its class and the settings beside it say, as transformers does."""

from __future__ import annotations

import contextlib

from tokenizers import Tokenizer, normalizers, pre_tokenizers

from exporter.huggingface.tokenizers.added import surround
from exporter.huggingface.tokenizers.settings import Settings


def follow_settings(tokenizer: Tokenizer, kind: str, settings: Settings) -> None:
    """Let letters and the space in front of a text be as the settings say; if silent, as they are.

    One file may have been changed, or written, without the other. Around a text stands what the
    class `kind` puts there, if the vocabulary has it.
    """
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
