"""Reads the tokenizer of a source."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import CheckpointError
from exporter.checkpoint import TOKENIZER_NAME
from exporter.models import TransformerConfig


def read_tokenizer(source: Path, config: TransformerConfig) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer, and what to know of it."""
    path = source / TOKENIZER_NAME
    if not path.is_file():
        raise CheckpointError(_no_tokenizer(source))
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise CheckpointError(f"{path} is no tokenizer: {error}; save it again") from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= config.vocab_size:
        raise CheckpointError(
            f"{path} has token ids up to {largest}, the model has a vocabulary of "
            f"{config.vocab_size}; give the tokenizer that the model was trained with"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
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
