"""The options and names of weights that Marian, BART and those that came of them share."""

from __future__ import annotations

from exporter.huggingface.conversion import (
    SQUEEZED,
    ModuleNames,
    NameTable,
    StoredWeight,
    layers,
    modules,
    skip_rows,
)
from exporter.huggingface.family import Options, Original, check_writes
from exporter.models.config import TransformerConfig

SHARED = "model.shared"
BODY = "model."
# The table that both have, where each side has one of its own, and what fairseq left there.
UNUSED = r"(model\.)?(shared\.weight|(encoder|decoder)\.version)"
COMPUTED_POSITIONS = rf"{UNUSED}|.*\.embed_positions\.weights?"  # or that nobody has learned
BART_LIKE = {
    "d_model": "d_model",
    "num_heads": "encoder_attention_heads",
    "d_ff": "encoder_ffn_dim",
    "num_encoder_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "feed_forward.activation": "activation_function",
    "dropout": "dropout",
    "attention.dropout": "attention_dropout",
    "feed_forward.dropout": "activation_dropout",
    "vocab_size": "vocab_size",
    "max_source_len": "max_position_embeddings",
    "max_target_len": "max_position_embeddings",
    "scale_embeddings": "scale_embedding",
    "tie_output": "tie_word_embeddings",
}


def bart_like(original: Original, start: int | None = None) -> Options:
    """Return the special tokens, `start` as what an answer begins behind where nothing says it."""
    check_writes(original)
    config, tokens = original.config, original.tokens
    for name in ("attention_heads", "ffn_dim"):
        given, other = getattr(config, f"encoder_{name}"), getattr(config, f"decoder_{name}")
        if given != other:
            raise ValueError(
                f"encoder_{name} is {given} and decoder_{name} {other}; supported: equal"
            )
    start = start if tokens.decoder_start is None else tokens.decoder_start
    if start is None:
        raise ValueError(
            "decoder_start_token_id is missing: the token that an answer begins behind; for a "
            "model that is told its language by it, set it to the token of that language"
        )
    return {"pad_token_id": tokens.pad or 0, "bos_token_id": start, "eos_token_id": tokens.eos}


def bart_like_weights(config: TransformerConfig, position_offset: int = 0) -> NameTable:
    """Return where the weights are; learned positions stand behind so many other rows."""
    source = "model.encoder.embed_tokens"
    embeddings: ModuleNames = {
        "source_embeddings.token": (SHARED, source) if config.share_embeddings else source,
        "decoder.embeddings.token": "model.decoder.embed_tokens",
        "decoder.output": "lm_head",
        "source_embeddings.norm": "model.encoder.layernorm_embedding",
        "decoder.embeddings.norm": "model.decoder.layernorm_embedding",
        "encoder.final_norm": "model.encoder.layer_norm",
        "decoder.final_norm": "model.decoder.layer_norm",
    }
    positions = {
        "source_embeddings.positions": "model.encoder.embed_positions",
        "decoder.embeddings.positions": "model.decoder.embed_positions",
    }
    return {
        **modules(embeddings),
        **modules(positions, skip_rows(position_offset)),
        "decoder.output.bias": StoredWeight(("final_logits_bias",), (SQUEEZED,), optional=True),
        **layer_weights("encoder"),
        **layer_weights("decoder"),
        **layers(
            "decoder",
            "model.decoder.layers",
            source_query="encoder_attn.q_proj",
            source_key="encoder_attn.k_proj",
            source_value="encoder_attn.v_proj",
            source_output="encoder_attn.out_proj",
            source_norm="encoder_attn_layer_norm",
        ),
    }


def layer_weights(stack: str) -> NameTable:
    """Return self-attention and feed-forward, which both stacks have."""
    return layers(
        stack,
        f"model.{stack}.layers",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        output="self_attn.out_proj",
        attention_norm="self_attn_layer_norm",
        up="fc1",
        down="fc2",
        feed_forward_norm="final_layer_norm",
    )
