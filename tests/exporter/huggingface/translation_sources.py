"""Tiny random encoder-decoders of Hugging Face, saved as their users save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.bart import BartConfig, BartForConditionalGeneration
from transformers.models.m2m_100 import M2M100Config, M2M100ForConditionalGeneration
from transformers.models.marian import MarianConfig, MarianMTModel
from transformers.models.mbart import MBartConfig, MBartForConditionalGeneration
from transformers.models.mt5 import MT5Config, MT5ForConditionalGeneration
from transformers.models.pegasus import PegasusConfig, PegasusForConditionalGeneration
from transformers.models.t5 import T5Config, T5ForConditionalGeneration

from tests.exporter.huggingface.sources import (
    EOS,
    MARIAN_OPTIONS,
    VOCAB_SIZE,
    save_tokenizer,
    tokenizer,
)

_NO_MARKS = {"forced_bos_token_id": None, "forced_eos_token_id": None}
_BART: dict[str, Any] = {
    **MARIAN_OPTIONS,
    **_NO_MARKS,
    "activation_function": "gelu",
    "pad_token_id": 1,  # which counts the first place of M2M-100
    "decoder_start_token_id": EOS,
    "bos_token_id": 0,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 16,
    "d_kv": 12,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": EOS,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "marian": (MarianMTModel, MarianConfig, {**_BART, "scale_embedding": True}),
    "bart": (BartForConditionalGeneration, BartConfig, _BART),
    "mbart": (MBartForConditionalGeneration, MBartConfig, {**_BART, "scale_embedding": True}),
    "m2m_100": (
        M2M100ForConditionalGeneration,
        M2M100Config,
        {**_BART, "activation_function": "relu", "scale_embedding": True},
    ),
    "pegasus": (PegasusForConditionalGeneration, PegasusConfig, {**_BART, "pad_token_id": 0}),
    "t5": (T5ForConditionalGeneration, T5Config, _T5),
    "mt5": (MT5ForConditionalGeneration, MT5Config, _T5),
}


def save(family: str, path: Path, *, own_output: bool = False, **options: Any) -> Any:
    """Make a model of a family and save it at `path`; `own_output` is not the embedding."""
    kind, config, defaults = MODELS[family]
    forced = {name: value for name, value in options.items() if name.startswith("forced_")}
    model = kind(config(**{**defaults, **options}))
    model.generation_config.update(**forced)  # which a config does not take any more
    if own_output:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    draw_weights(model)
    model.eval().save_pretrained(path)
    save_tokenizer(path, tokenizer(ends=True))
    return model


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Draw weights so large that any fault shows: zero biases and unit norms would hide some."""
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and weight.requires_grad:  # computed positions have no gradient
            nn.init.normal_(weight, std=_spread(name))
        elif weight.ndim == 1:
            weight.add_(0.2 * torch.randn(weight.shape))
    padding = model.config.pad_token_id
    model.get_input_embeddings().weight[padding] = 0.0  # as of trained models
    if hasattr(model, "final_logits_bias"):
        width = model.final_logits_bias.shape[1]
        model.final_logits_bias[0] = torch.linspace(-0.1, 0.1, width)


def _spread(name: str) -> float:
    if name.endswith((".q.weight", ".wi_0.weight", ".wi_1.weight")):
        return 0.1  # scores of T5 are not scaled, and a gate multiplies what it is given
    if any(part in name for part in ("embed_positions", "relative_attention_bias", "lm_head")):
        return 1.0
    return 0.3 if ".layers." in name or ".block." in name else 0.5
