"""What Marian, BART and those that came of them have in common: fields, and names of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import model_validator

from exporter.huggingface.conversion import (
    ModuleNames,
    NameTable,
    SkipRows,
    Squeezed,
    StoredWeight,
    layers,
    modules,
)
from exporter.huggingface.family import ACTIVATIONS, Activation, SpecialTokens, WriterConfig
from exporter.models.config import PositiveInt, Probability, TransformerConfig

SHARED = "model.shared"
BODY = "model."
# The table that both have, where each side has one of its own, and what fairseq left there.
UNUSED = r"(model\.)?(shared\.weight|(encoder|decoder)\.version)"
COMPUTED_POSITIONS = rf"{UNUSED}|.*\.embed_positions\.weights?"  # or that nobody has learned


class BartLikeConfig(WriterConfig):
    """`config.json`, with the defaults that these families share."""

    second_names: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    # A model that was distilled keeps its teacher's; if that is right, the weights say so.
    weak_names: ClassVar[frozenset[str]] = frozenset({"num_hidden_layers"})

    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt = 1024
    d_model: PositiveInt = 1024
    encoder_layers: PositiveInt = 12
    decoder_layers: PositiveInt = 12
    encoder_attention_heads: PositiveInt = 16
    decoder_attention_heads: PositiveInt = 16
    encoder_ffn_dim: PositiveInt = 4096
    decoder_ffn_dim: PositiveInt = 4096
    activation_function: Activation = "gelu"
    scale_embedding: bool = False
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.0
    activation_dropout: Probability = 0.0
    tie_word_embeddings: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("attention_heads", "ffn_dim"):
            given, other = getattr(self, f"encoder_{name}"), getattr(self, f"decoder_{name}")
            if given != other:
                raise ValueError(
                    f"encoder_{name} is {given} and decoder_{name} {other}; supported: equal"
                )
        return self


def bart_like(
    given: BartLikeConfig, tokens: SpecialTokens, **differences: object
) -> TransformerConfig:
    """Return the options that all have, and those in which a family differs."""
    start = tokens.decoder_start
    if start is None:
        raise ValueError(
            "decoder_start_token_id is missing: the token that an answer begins behind; for a "
            "model that is told its language by it, set it to the token of that language"
        )
    options: dict[str, object] = {
        "d_model": given.d_model,
        "num_heads": given.encoder_attention_heads,
        "d_ff": given.encoder_ffn_dim,
        "num_encoder_layers": given.encoder_layers,
        "num_decoder_layers": given.decoder_layers,
        "activation": ACTIVATIONS[given.activation_function],
        "dropout": given.dropout,
        "attention_dropout": given.attention_dropout,
        "feed_forward_dropout": given.activation_dropout,
        "vocab_size": given.vocab_size,
        "max_source_len": given.max_position_embeddings,
        "max_target_len": given.max_position_embeddings,
        "scale_embeddings": given.scale_embedding,
        "tie_output": given.tie_word_embeddings,
        "pad_token_id": tokens.pad or 0,
        "bos_token_id": start,
        "eos_token_id": tokens.eos,
    }
    return TransformerConfig.model_validate({"family": "encoder-decoder", **options, **differences})


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
        **modules(positions, SkipRows(position_offset)),
        "decoder.output.bias": StoredWeight(("final_logits_bias",), (Squeezed(),), optional=True),
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
