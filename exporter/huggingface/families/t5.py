"""T5, its later forms and mT5: relative positions, no biases, scores that are not scaled."""

from __future__ import annotations

from dataclasses import replace

from exporter.huggingface.conversion import (
    ModuleNames,
    NameTable,
    StoredWeight,
    layers,
    modules,
)
from exporter.huggingface.family import Family, Options, Original, check_writes
from exporter.models.config import TransformerConfig

_LENGTH = 512  # sources and answers, unless config.json has n_positions
_LENGTH_OF_BYTES = 1024


def _computed(original: Original) -> Options:
    check_writes(original)
    config, said, tokens = original.config, original.said, original.tokens
    is_bytes = said.get("tokenizer_class") == "ByT5Tokenizer"
    # The model itself knows no limit.
    max_len = said.get("n_positions") or (_LENGTH_OF_BYTES if is_bytes else _LENGTH)
    # The input of the output layer is scaled, unless it has a table of its own; never in an mT5.
    is_scaled = config.model_type == "t5" and config.scale_decoder_outputs
    pad = tokens.pad or 0
    return {
        "max_source_len": max_len,
        "max_target_len": max_len,
        "output_scale": config.d_model**-0.5 if is_scaled else 1.0,
        "pad_token_id": pad,
        "bos_token_id": pad if tokens.decoder_start is None else tokens.decoder_start,
        "eos_token_id": tokens.eos,
    }


def _weights(config: TransformerConfig) -> NameTable:
    tokens: ModuleNames = {
        "source_embeddings.token": ("shared", "encoder.embed_tokens"),
        "decoder.embeddings.token": "decoder.embed_tokens",
        "decoder.output": "lm_head",
    }
    return {
        **modules(tokens),
        **_stack("encoder", "layer.1"),
        **_stack("decoder", "layer.2"),
        **layers(
            "decoder",
            "decoder.block",
            source_query="layer.1.EncDecAttention.q",
            source_key="layer.1.EncDecAttention.k",
            source_value="layer.1.EncDecAttention.v",
            source_output="layer.1.EncDecAttention.o",
            source_norm="layer.1.layer_norm",
        ),
    }


def _stack(name: str, feed_forward: str) -> NameTable:
    """Return what both stacks have; `feed_forward` is the name of that in a layer of theirs."""
    inner = f"{feed_forward}.DenseReluDense"
    bias = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return {
        **layers(
            name,
            f"{name}.block",
            query="layer.0.SelfAttention.q",
            key="layer.0.SelfAttention.k",
            value="layer.0.SelfAttention.v",
            output="layer.0.SelfAttention.o",
            attention_norm="layer.0.layer_norm",
            up=(f"{inner}.wi", f"{inner}.wi_1"),  # the latter where there is a gate
            gate=f"{inner}.wi_0",
            down=f"{inner}.wo",
            feed_forward_norm=f"{feed_forward}.layer_norm",
        ),
        **modules({f"{name}.final_norm": f"{name}.final_layer_norm"}),
        f"{name}.relative.weight": StoredWeight((bias,)),
    }


T5 = Family(
    title="T5, FLAN-T5, MADLAD, ByT5",
    model_types=("t5",),
    fixed={
        "architecture": "encoder-decoder",
        "attention.bias": False,
        "attention.scale": 1.0,
        "feed_forward.bias": False,
        "feed_forward.float32_output": True,  # as `_keep_in_fp32_modules` of transformers has it
        "norm": "rms",
        "norm_position": "first",
        "positions.kind": "relative",
        "scale_embeddings": False,
    },
    options={
        "d_model": "d_model",
        "num_heads": "num_heads",
        "key_dim": "d_kv",
        "value_dim": "d_kv",
        "d_ff": "d_ff",
        "num_encoder_layers": "num_layers",
        "num_decoder_layers": "num_decoder_layers",
        "feed_forward.activation": "dense_act_fn",
        "feed_forward.gated": "is_gated_act",
        "norm_eps": "layer_norm_epsilon",
        "dropout": "dropout_rate",
        "vocab_size": "vocab_size",
        "positions.relative_buckets": "relative_attention_num_buckets",
        "positions.relative_max_distance": "relative_attention_max_distance",
    },
    computed=_computed,
    weights=_weights,
    ignored=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)
MT5 = replace(T5, title="mT5", model_types=("mt5",))
