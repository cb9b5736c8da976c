"""Reads the tokenizer of a source."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import CheckpointError
from engine.text.tokenizer_file import read_tokenizer_file
from exporter.checkpoint import TOKENIZER_NAME
from exporter.models import TransformerConfig


def read_tokenizer(source: Path, config: TransformerConfig) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer, and what to know of it."""
    path = source / TOKENIZER_NAME
    if not path.is_file():
        raise CheckpointError(_no_tokenizer(source))
    try:
        tokenizer = read_tokenizer_file(path, config.vocab_size).tokenizer
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is no tokenizer of this model: {error}; give the one that it was trained "
            "with, or save it again"
        ) from error
    if config.family != "encoder-decoder" or tokenizer.encode("").ids[-1:] == [config.eos_token_id]:
        return tokenizer, []
    return tokenizer, [
        f"{TOKENIZER_NAME} does not end a source with eos_token_id {config.eos_token_id}; "
        "if the model was trained with it, add it in the post-processor"
    ]


def _no_tokenizer(source: Path) -> str:
    if any(source.glob("*.spm")):
        return (
            f"{source} has SentencePiece files (*.spm) and no {TOKENIZER_NAME}; they are not "
            f"converted: write {TOKENIZER_NAME} with the `tokenizers` library, with the ids of "
            "vocab.json and a post-processor that ends a source with the end token"
        )
    return (
        f"{source} has no {TOKENIZER_NAME}; write it with transformers: "
        "`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"
    )
