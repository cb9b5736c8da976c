"""Makes a tokenizer of BERT's `vocab.txt`."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.json_file import read_bounded
from exporter.huggingface.tokenizers.added import add_tokens, surround
from exporter.huggingface.tokenizers.settings import Settings, Token

WORDS_NAME = "vocab.txt"
_MAX_BYTES = 2**26


def read_bert(directory: Path, settings: Settings, room: int) -> Tokenizer:
    """Return the tokenizer of a BERT: a text stands between `[CLS]` and `[SEP]`."""
    lines = read_bounded(directory / WORDS_NAME, _MAX_BYTES).decode().split("\n")
    if lines and not lines[-1]:
        lines.pop()
    ids = {line.rstrip("\r"): i for i, line in enumerate(lines)}
    unknown = settings.text_of("unk_token", "[UNK]")
    tokenizer = Tokenizer(models.WordPiece(vocab=ids, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=settings.tokenize_chinese_chars,
        strip_accents=settings.strip_accents,
        lowercase=settings.do_lower_case is not False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    named = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    known = [unknown, *(settings.text_of(f"{name}_token", text) for name, text in named.items())]
    add_tokens(tokenizer, [Token(content=name) for name in known], settings)
    surround(tokenizer, "BertTokenizer", settings)
    return tokenizer
