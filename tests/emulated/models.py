"""Models of every kind, to be looked at on the emulated device.

Those of the demo are as it trains them, but for the number of layers and of tokens; the others are
small.
"""

from __future__ import annotations

from typing import Any

from exporter.models import ImageConfig
from exporter.tasks.tagged_sentences import TAGS

_VOCABULARY = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {"d_model": 64, "num_heads": 2, "d_ff": 128}
_OF_DEMO = {"d_model": 64, "num_heads": 4, "d_ff": 256, "norm_position": "first"}
_TRANSLATION = {
    **_VOCABULARY,
    **_SMALL,
    "architecture": "encoder-decoder",
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "max_source_len": 48,
    "max_target_len": 48,
}
_GPT2 = {
    **_VOCABULARY,
    "architecture": "decoder",
    "d_model": 128,
    "num_heads": 2,
    "d_ff": 256,
    "num_decoder_layers": 2,
    "max_target_len": 64,
    "positions.kind": "learned",
    "feed_forward.activation": "gelu_tanh",
    "norm_position": "first",
    "scale_embeddings": False,
}
_LLAMA = {
    **_GPT2,
    "d_model": 256,
    "num_heads": 8,
    "num_kv_heads": 2,
    "key_dim": 64,
    "value_dim": 64,
    "positions.kind": "rotary",
    "feed_forward.activation": "silu",
    "feed_forward.gated": True,
    "norm": "rms",
    "attention.bias": False,
    "feed_forward.bias": False,
    "tie_output": False,
}
_NO_BIASES = {"norm": "rms", "attention.bias": False, "feed_forward.bias": False}
_T5 = {
    **_TRANSLATION,
    **_NO_BIASES,
    "norm_position": "first",
    "positions.kind": "relative",
    "attention.scale": 1.0,
    "feed_forward.activation": "gelu_tanh",
    "feed_forward.gated": True,
    "scale_embeddings": False,
}
_READER = {**_VOCABULARY, **_SMALL, "num_encoder_layers": 2, "max_source_len": 48}
# For each of them a vector
_SENTENCES = {**_READER, "architecture": "encoder", "head.pooler": "none"}
MODELS: dict[str, dict[str, Any]] = {
    "dates": {
        **_TRANSLATION,
        **_OF_DEMO,
        "d_model": 128,
        "d_ff": 512,
        "max_source_len": 64,
        "max_target_len": 16,
    },
    "marian": {
        **_TRANSLATION,
        "positions.kind": "sinusoidal_halves",
        "feed_forward.activation": "silu",
        "output_bias": True,
    },
    "t5": _T5,
    "text": {
        **_VOCABULARY,
        "architecture": "decoder",
        **_OF_DEMO,
        "d_model": 128,
        "d_ff": 512,
        "num_decoder_layers": 2,
        "max_target_len": 256,
        "feed_forward.activation": "gelu",
    },
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "gemma2": {
        **_LLAMA,
        "attention.window": 16,
        "attention.windowed_layers": (0,),
        "attention.softcap": 50.0,
    },
    "sentiment": {
        **_READER,
        **_OF_DEMO,
        "architecture": "encoder",
        "max_source_len": 128,
        "positions.kind": "learned",
        "feed_forward.activation": "gelu",
        "norm_position": "last",
        "norm_eps": 1e-12,
        "embedding_norm": True,
        "num_token_types": 2,
        "scale_embeddings": False,
        "labels": ("negative", "positive"),
    },
    "sentences": {**_SENTENCES, "head.pooling": "mean", "head.normalize": True},
    "sentences-max": {**_SENTENCES, "head.pooling": "max"},
    "modernbert": {
        **_READER,
        "architecture": "encoder",
        "positions.kind": "rotary",
        "positions.local_rotary_base": 100.0,
        "attention.window": 9,
        "attention.windowed_layers": (0,),
        "feed_forward.activation": "gelu",
        "feed_forward.gated": True,
        "norm_position": "first",
        "first_norm": False,
        "norm_bias": False,
        "attention.bias": False,
        "feed_forward.bias": False,
        "embedding_norm": True,
        "scale_embeddings": False,
        "head.pooling": "mean",
        "labels": ("one", "two"),
    },
    "tagging": {
        **_READER,
        **_OF_DEMO,
        "architecture": "encoder",
        "head.each_token": True,
        "max_source_len": 64,
        "labels": TAGS,
    },
    "digits": {
        **_OF_DEMO,
        "architecture": "vision-encoder",
        "num_encoder_layers": 2,
        "positions.kind": "learned",
        "feed_forward.activation": "gelu",
        "image": ImageConfig(size=16, patch_size=4, channels=1, mean=(0.3,), std=(0.35,)),
        "labels": tuple("0123456789"),
    },
}

# Those of the demo and of well-known shapes; the others are tried by `make test-emulated`.
FIRST = ("tagging", "digits", "gpt2", "llama", "marian")
