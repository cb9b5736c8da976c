"""The smallest published shape of every family, by what transformers calls its options.

The smallest shapes of four families have 2 to 7 billion parameters. They stand here with two layers
besides, as wide as they are and with all their words: so they fit a machine of 24 GB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class FamilyShape:
    """One published model, without its weights."""

    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)  # beside the defaults of transformers
    max_len: int | None = 128  # tokens of a text; None: it reads none


def _sizes(width: int, inner: int, layers: int, heads: int, **options: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **options,
    }


def _sides(width: int, inner: int, layers: int, heads: int, **options: Any) -> dict[str, Any]:
    """Return the sizes of an encoder-decoder with two stacks that are alike."""
    sizes = {"ffn_dim": inner, "layers": layers, "attention_heads": heads}
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sizes.items()}
    return {"d_model": width, **sides, **options}


_T5 = {"decoder_start_token_id": 0}
_GATED = {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_GEMMA3_270M = _sizes(640, 2048, 18, 4, num_key_value_heads=1, head_dim=256, sliding_window=512)
_ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
# DeiT has two classifiers.
PLAIN_DEIT = {"architectures": ["DeiTForImageClassification"]}
_TINY_IMAGES = _sizes(192, 768, 12, 3)

_WHOLE: Mapping[str, FamilyShape] = {
    "opus-mt": FamilyShape(
        "marian",
        {
            **_sides(512, 2048, 6, 8, activation_function="swish", scale_embedding=True),
            "max_position_embeddings": 512,
        },
    ),
    "bart-base": FamilyShape("bart", _sides(768, 3072, 6, 12)),
    "mbart-large": FamilyShape(
        "mbart",
        {"vocab_size": 250027, "scale_embedding": True, "decoder_start_token_id": 250004},
    ),
    "m2m100-418m": FamilyShape("m2m_100"),
    "nllb-600m": FamilyShape("m2m_100", {"vocab_size": 256206}),
    "pegasus-large": FamilyShape(
        "pegasus", {"vocab_size": 96103, "activation_function": "relu", "scale_embedding": True}
    ),
    "t5-small": FamilyShape("t5", _T5),
    "flan-t5-small": FamilyShape("t5", {**_GATED, "d_ff": 1024, "num_layers": 8, "num_heads": 6}),
    "byt5-small": FamilyShape(
        "t5",
        {
            **_GATED,
            **{"vocab_size": 384, "d_model": 1472, "d_ff": 3584, "num_heads": 6},
            **{"num_layers": 12, "num_decoder_layers": 4},
        },
    ),
    "madlad-3b": FamilyShape(
        "t5",
        {
            **_GATED,
            **{"vocab_size": 256000, "d_model": 1024, "d_kv": 128, "d_ff": 8192},
            **{"num_layers": 32, "num_heads": 16},
        },
    ),
    "mt5-small": FamilyShape("mt5", {**_T5, "tie_word_embeddings": False}),
    "gpt2": FamilyShape("gpt2"),
    "pythia-14m": FamilyShape("gpt_neox", {**_sizes(128, 512, 6, 4), "vocab_size": 50304}),
    "pythia-70m": FamilyShape("gpt_neox", {**_sizes(512, 2048, 6, 8), "vocab_size": 50304}),
    "opt-125m": FamilyShape("opt"),
    "smollm2-135m": FamilyShape(
        "llama",
        {
            **_sizes(576, 1536, 30, 9, num_key_value_heads=3, tie_word_embeddings=True),
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    "mistral-7b": FamilyShape("mistral", {"max_position_embeddings": 32768}),
    "qwen2-0.5b": FamilyShape(
        "qwen2",
        {
            **_sizes(896, 4864, 24, 14, num_key_value_heads=2, tie_word_embeddings=True),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "qwen3-0.6b": FamilyShape(
        "qwen3",
        {
            **_sizes(1024, 3072, 28, 16, num_key_value_heads=8, tie_word_embeddings=True),
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "gemma2-2b": FamilyShape("gemma2"),
    "gemma3-270m": FamilyShape(
        "gemma3_text", {**_GEMMA3_270M, "vocab_size": 262144, "max_position_embeddings": 32768}
    ),
    "phi3-mini": FamilyShape("phi3", {"sliding_window": 2047}),
    "bert-tiny": FamilyShape("bert", _sizes(128, 512, 2, 2)),
    "roberta-base": FamilyShape("roberta", {**_ROBERTA, "vocab_size": 50265}),
    "xlm-roberta-base": FamilyShape("xlm-roberta", {**_ROBERTA, "vocab_size": 250002}),
    "camembert-base": FamilyShape("camembert", {**_ROBERTA, "vocab_size": 32005}),
    "distilbert-base": FamilyShape("distilbert"),
    "modernbert-base": FamilyShape("modernbert"),
    "vit-tiny": FamilyShape("vit", _TINY_IMAGES, max_len=None),
    "deit-tiny": FamilyShape("deit", {**_TINY_IMAGES, **PLAIN_DEIT}, max_len=None),
}


def _with_two_layers(shape: FamilyShape) -> FamilyShape:
    layers = "num_layers" if shape.model_type == "t5" else "num_hidden_layers"
    return replace(shape, options={**shape.options, layers: 2})


SHAPES: Mapping[str, FamilyShape] = {
    **_WHOLE,
    **{
        f"{name}-2-layers": _with_two_layers(_WHOLE[name])
        for name in ("mistral-7b", "phi3-mini", "gemma2-2b", "madlad-3b")
    },
}
