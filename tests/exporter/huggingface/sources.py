"""Tiny random models of Hugging Face, saved as their users save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.marian import MarianConfig, MarianMTModel

VOCAB_SIZE = 37
PAD = 36
EOS = 32  # which the Marian model writes behind some sources

GPT2_OPTIONS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": 20,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 28,
    "eos_token_id": 28,  # which the model writes behind some prompts
    "layer_norm_epsilon": 1e-3,
}
LLAMA_OPTIONS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 20,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "tie_word_embeddings": True,
    "bos_token_id": 25,
    "eos_token_id": 25,  # which the model writes behind some prompts
}
MARIAN_OPTIONS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 16,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "activation_function": "swish",
    "scale_embedding": True,
    "pad_token_id": PAD,
    "decoder_start_token_id": PAD,
    "eos_token_id": EOS,
    "forced_eos_token_id": None,
}


def save_gpt2(path: Path, **options: Any) -> GPT2LMHeadModel:
    """Make a GPT-2 and save it at `path`."""
    model = GPT2LMHeadModel(GPT2Config(**{**GPT2_OPTIONS, **options}))
    save_model(model, path, tokenizer())
    return model


def save_llama(path: Path, **options: Any) -> LlamaForCausalLM:
    """Make a Llama and save it at `path`."""
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA_OPTIONS, **options}))
    save_model(model, path, tokenizer())
    return model


def save_marian(path: Path, **options: Any) -> MarianMTModel:
    """Make a Marian model that may not write its padding, and save it at `path`."""
    model = MarianMTModel(MarianConfig(**{**MARIAN_OPTIONS, **options}))
    model.generation_config.bad_words_ids = [[PAD]]
    model.final_logits_bias[0, :PAD] = torch.linspace(-0.5, 0.5, PAD)
    # The padding's own logit would be the largest of all, were it not suppressed.
    model.final_logits_bias[0, PAD] = 100.0
    save_model(model, path, tokenizer(ends=True))
    return model


def tokenizer(*, ends: bool = False) -> Tokenizer:
    """Return a tokenizer of numbered words, which ends a text with EOS or not."""
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, "w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if ends:
        made.post_processor = processors.TemplateProcessing(
            single=f"$A w{EOS}", special_tokens=[(f"w{EOS}", EOS)]
        )
    return made


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def save_model(model: Any, path: Path, its_tokenizer: Tokenizer) -> None:
    """Draw the weights of a model and save it with a tokenizer at `path`."""
    _draw_weights(model)
    model.eval().save_pretrained(path)
    save_tokenizer(path, its_tokenizer)


def save_tokenizer(path: Path, its_tokenizer: Tokenizer) -> None:
    """Save a tokenizer that transformers reads as it is, whatever is usual of the model."""
    its_tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')


@torch.no_grad()
def _draw_weights(model: nn.Module) -> None:
    """Draw weights so large that any fault shows: zero biases and unit norms would hide some."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and weight.requires_grad:  # computed positions have no gradient
            nn.init.normal_(weight, std=0.3 if "layers." in name or "h." in name else 0.6)
        elif weight.ndim == 1:
            weight.add_(0.2 * torch.randn(weight.shape))
