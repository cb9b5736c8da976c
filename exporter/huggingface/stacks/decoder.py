"""The options that decoders without an encoder share."""

from __future__ import annotations

from exporter.huggingface.family import Options, Original, check_writes

DECODER = {
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_decoder_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "max_target_len": "max_position_embeddings",
    "tie_output": "tie_word_embeddings",
}
FIXED = {
    "architecture": "decoder",
    "norm_position": "first",
    "positions.kind": "learned",
    "scale_embeddings": False,
    "dropout": 0.0,
}


def decoder(original: Original) -> Options:
    """Return the special tokens of a model that writes."""
    check_writes(original)
    return {"pad_token_id": original.tokens.pad or 0, "eos_token_id": original.tokens.eos}
