"""Says what an import has understood of a model, a line each."""

from __future__ import annotations

from engine.wording import listed
from exporter.huggingface.tokenizers import ImportedTokenizer
from exporter.models import TransformerConfig

_POOLINGS = {"first": "that of the first token", "mean": "mean of all tokens", "max": "maximum"}
_MOST_LABELS = 6  # that are named


def understood(family: str, config: TransformerConfig, text: ImportedTokenizer) -> dict[str, str]:
    """Return what is told, by what it is of."""
    found = {"family": family, "longest input": _longest(config)}
    if text.tokenizer is not None:
        kind, encoded = type(text.tokenizer.model).__name__, text.tokenizer.encode("a")
        specials = zip(encoded.tokens, encoded.special_tokens_mask, strict=True)
        around = " ".join(token if is_special else "..." for token, is_special in specials)
        said = f"a text is {around}" if any(encoded.special_tokens_mask) else ""
        size = text.tokenizer.get_vocab_size(with_added_tokens=True)
        said = said or "nothing stands around a text"
        found["tokenizer"] = f"{kind}, {size:,} tokens; {said}"
    if config.architecture == "decoder":
        found["chat template"] = "yes" if text.files.chat else "none"
    if config.num_decoder_layers:
        writes = text.files.target_tokenizer or text.tokenizer
        ends = [
            f"{(writes and writes.id_to_token(token_id)) or 'no token'} ({token_id})"
            for token_id in config.eos_token_ids
        ]
        found["ends"] = listed(ends) or "none, answers are as long as asked"
    elif config.labels:
        more = len(config.labels) - _MOST_LABELS
        named = listed(config.labels[:_MOST_LABELS]) + (f" and {more:,} more" if more > 0 else "")
        head = config.head
        kind = "of every token" if head.each_token else f"by {head.label_scores}"
        found["labels"] = f"{named}; {kind}"
    else:
        found["vectors"] = _of_vectors(config)
    return found


def _longest(config: TransformerConfig) -> str:
    if config.image is not None:
        return f"a picture, made {config.image.size} x {config.image.size} pixels"
    if config.architecture == "decoder":
        return f"{config.max_target_len:,} tokens with the answer"
    if config.architecture == "encoder-decoder":
        return f"{config.max_source_len:,} tokens; an answer has {config.max_target_len:,}"
    if config.cut_at is None:
        return f"{config.max_source_len:,} tokens"
    return f"{config.cut_at:,} tokens; longer texts are cut"


def _of_vectors(config: TransformerConfig) -> str:
    pooled = _POOLINGS["first" if config.image else config.head.pooling]
    dense = "" if config.pooler_kind == "none" else f", dense layer ({config.pooler_kind})"
    length = "normalized" if config.head.normalize else "not normalized"
    return f"{pooled}{dense}, {config.vector_dim:,} numbers, {length}"
