"""Makes the tokenizer of a checkpoint of the files that an original has."""

from __future__ import annotations

from exporter.huggingface.tokenizers.reader import ImportedTokenizer, Languages, read_tokenizer

__all__ = ["ImportedTokenizer", "Languages", "read_tokenizer"]
