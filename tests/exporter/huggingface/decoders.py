"""Tiny random decoders of every family, each with variants that published models show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from tests.exporter.huggingface.sources import VOCAB_SIZE, save_model, tokenizer

MAX_LEN = 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 25,
    "eos_token_id": 25,
    "pad_token_id": 36,
}
_ROTARY: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
_LAYERED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 6,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [9.0] * 6,
    "partial_rotary_factor": 0.75,
}
OPT_350M = {"do_layer_norm_before": False, "word_embed_proj_dim": 12}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"layer_norm_epsilon": 1e-3, **SIZES},
    "gpt_neox": {
        **SIZES,
        "hidden_size": 64,
        "layer_norm_eps": 1e-3,
        "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.25},
    },
    "opt": {
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
        "ffn_dim": 40,
        "word_embed_proj_dim": 32,
    },
    "llama": {**_ROTARY},
    "mistral": {**_ROTARY, "sliding_window": 5},
    "qwen2": {
        **{k: v for k, v in _ROTARY.items() if k != "head_dim"},
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {**_ROTARY, "tie_word_embeddings": True},
    "gemma2": {
        **_ROTARY,
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        **_ROTARY,
        "num_hidden_layers": 3,
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "rope_parameters": _LAYERED,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "phi3": {
        **{k: v for k, v in _ROTARY.items() if k != "head_dim"},
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window": 5,
    },
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in DECODERS),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt_neox", {"tie_word_embeddings": True, "hidden_act": "gelu_fast"}),
    ("opt", {"do_layer_norm_before": False}),
    ("opt", OPT_350M),
    ("opt", {"enable_bias": False, "_remove_final_layer_norm": True}),
    ("opt", {"tie_word_embeddings": False, "activation_function": "gelu"}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": {**YARN, "truncate": False, "attention_factor": 0.7}}),
    ("llama", {"rope_parameters": {**YARN, "mscale": 0.5, "mscale_all_dim": 0.8}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 3.0}}),
    ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    ("qwen2", {"tie_word_embeddings": False, "use_sliding_window": True, "sliding_window": 4}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", {"sliding_window_pattern": 2, "layer_types": None}),
    ("phi3", {"sliding_window": None, "num_key_value_heads": 2}),
    ("phi3", {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 20}),
]


def save_decoder(path: Path, model_type: str, **options: Any) -> Any:
    """Make a model of a family and save it at `path`."""
    config = AutoConfig.for_model(model_type, **{**DECODERS[model_type], **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    save_model(model, path, tokenizer())
    return model
