"""The models whose answers are checked: those of the demo, and small ones of well-known shapes.

Weights are random: a certificate compares with the same weights, whatever they are. Widths and
heads are those of the real models, or near them, as kernels are chosen by these; layers are few.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models

from exporter.checkpoint import save_checkpoint
from exporter.models import TransformerConfig, build_model
from exporter.tasks import TASKS, build_task

_SEED = 0
_NUM_WORDS = 200  # in a tokenizer that nobody reads
_TEXT_WORDS = 8_000  # for the task that learns from a file

_GPT2: dict[str, Any] = {
    "architecture": "decoder",
    "d_model": 768,
    "num_heads": 12,
    "d_ff": 3072,
    "num_decoder_layers": 2,
    "vocab_size": 50_257,
    "max_target_len": 256,
    "positions.kind": "learned",
    "feed_forward.activation": "gelu_tanh",
    "norm_position": "first",
    "scale_embeddings": False,
    "eos_token_id": 0,
}
_LLAMA: dict[str, Any] = {
    **_GPT2,
    "d_model": 1024,
    "num_heads": 8,
    "num_kv_heads": 2,
    "d_ff": 3584,
    "vocab_size": 8192,
    "positions.kind": "rotary",
    "positions.rotary_base": 500_000.0,
    "feed_forward.activation": "silu",
    "feed_forward.gated": True,
    "norm": "rms",
    "attention.bias": False,
    "feed_forward.bias": False,
    "tie_output": False,
}
_MARIAN: dict[str, Any] = {
    "architecture": "encoder-decoder",
    "d_model": 512,
    "num_heads": 8,
    "d_ff": 2048,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "vocab_size": 8192,
    "max_source_len": 128,
    "max_target_len": 128,
    "positions.kind": "sinusoidal_halves",
    "feed_forward.activation": "silu",
    "output_bias": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
_SHAPES: Mapping[str, dict[str, Any]] = {"gpt2": _GPT2, "llama": _LLAMA, "marian": _MARIAN}
_QUICK_LENGTH = 16  # tokens of sources and targets
_QUICK_LAYERS = 1
_QUICK = {"d_model": 128, "d_ff": 256, "vocab_size": 256}
_QUICK_HEADS: Mapping[str, dict[str, int]] = {
    "gpt2": {"num_heads": 2, "max_target_len": _QUICK_LENGTH},
    "llama": {"num_heads": 4, "num_kv_heads": 1, "key_dim": 64, "value_dim": 64}
    | {"max_target_len": _QUICK_LENGTH},
    "marian": {"num_heads": 2, "max_source_len": _QUICK_LENGTH, "max_target_len": _QUICK_LENGTH},
}

MODELS = (*TASKS, *_SHAPES)


def make_checkpoint(name: str, directory: Path, *, quick: bool) -> Path:
    """Return the checkpoint of a model in `directory`; it is made if it is not there."""
    path = directory / name / "checkpoint"
    if not path.is_dir():
        torch.manual_seed(_SEED)
        if name in TASKS:
            _make_of_task(name, path, quick)
        else:
            config = _SHAPES[name]
            if quick:
                config = _shallow({**config, **_QUICK, **_QUICK_HEADS[name]})
            model = build_model(TransformerConfig.of(config))
            save_checkpoint(path, name, model, _numbers())
    return path


def _make_of_task(name: str, path: Path, quick: bool) -> None:
    """Write the model of a demo as it is before its first step of training."""
    files = []
    if name == "text":
        path.parent.mkdir(parents=True, exist_ok=True)
        files = [path.parent / "text.txt"]
        files[0].write_text(_text())
    task = build_task(name, files=files)
    config = task.config.model_dump()
    if quick:
        limits = [name for name in ("max_source_len", "max_target_len") if config[name]]
        config = _shallow(config | dict.fromkeys(limits, _QUICK_LENGTH))
    model = build_model(TransformerConfig.of(config))
    save_checkpoint(path, name, model, task.tokenizer)


def _shallow(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a model is made of, with few layers: to trace them takes most of an export."""
    layers = [name for name in ("num_encoder_layers", "num_decoder_layers") if config.get(name)]
    return config | dict.fromkeys(layers, _QUICK_LAYERS)


def _text() -> str:
    draw = random.Random(_SEED)
    letters = "etaoinshrdlu"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 8))) for _ in range(_NUM_WORDS)]
    lines = (" ".join(draw.choices(words, k=10)) for _ in range(_TEXT_WORDS // 10))
    return "\n".join(lines)


def _numbers() -> Tokenizer:
    """Return a tokenizer of numbers; certificates take ids."""
    return Tokenizer(models.WordLevel({str(i): i for i in range(_NUM_WORDS)}, unk_token="0"))
