"""Models of the real sizes, whose speed is measured: random weights, written straight as graphs.

There is no checkpoint: the model is drawn where that is fastest, in the precision of its graphs,
and its package is graphs, their weights, and the contract, without a certificate.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.package.manifest import PackageFormat, Precision, Weights
from exporter.graphs.contracts import generation_contract
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.target import target_of
from exporter.graphs.torch_export import build_graphs
from exporter.graphs.weights import quantize
from exporter.models import TransformerConfig, build_model
from loadtest.gpu_check.contract_file import write_contract

_SEED = 0
DTYPES: Mapping[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True)
class Shape:
    """A model's size, ours and as Hugging Face names it, and what a request asks of it."""

    precision: Precision
    ours: Mapping[str, Any]
    family: str  # Hugging Face's: its configuration and model are {family}Config, {family}...
    theirs: Mapping[str, Any]
    num_prompt_tokens: int = 128
    num_new_tokens: int = 64
    quick: Mapping[str, Any] = field(default_factory=dict)  # replaces some of ours with --quick


def _decoder(d_model: int, heads: int, layers: int, d_ff: int, vocab: int) -> dict[str, Any]:
    return {
        "architecture": "decoder",
        "d_model": d_model,
        "num_heads": heads,
        "num_decoder_layers": layers,
        "d_ff": d_ff,
        "vocab_size": vocab,
        "max_target_len": 1024,
        "norm_position": "first",
        "scale_embeddings": False,
        "dropout": 0.0,
    }


def _llama(d_model: int, heads: int, layers: int, d_ff: int, *, tied: bool) -> dict[str, Any]:
    return {
        **_decoder(d_model, heads, layers, d_ff, 128_256),
        "num_kv_heads": 8,
        "positions.kind": "rotary",
        "positions.rotary_base": 500_000.0,
        "feed_forward.activation": "silu",
        "feed_forward.gated": True,
        "norm": "rms",
        "attention.bias": False,
        "feed_forward.bias": False,
        "tie_output": tied,
    }


def _their_llama(d_model: int, heads: int, layers: int, d_ff: int, *, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": d_model,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": d_ff,
        "vocab_size": 128_256,
        "num_key_value_heads": 8,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": tied,
    }


def _seq2seq(d_model: int, heads: int, layers: int, d_ff: int, vocab: int) -> dict[str, Any]:
    return {
        **_decoder(d_model, heads, layers, d_ff, vocab),
        "architecture": "encoder-decoder",
        "num_encoder_layers": layers,
        "norm_position": "last",
        "bos_token_id": 0,
    }


def _their_seq2seq(
    d_model: int, heads: int, layers: int, d_ff: int, vocab: int, positions: int
) -> dict[str, Any]:
    sizes: dict[str, Any] = {"d_model": d_model, "vocab_size": vocab}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": layers, f"{side}_ffn_dim": d_ff}
        sizes[f"{side}_attention_heads"] = heads
    return {**sizes, "max_position_embeddings": positions, "decoder_start_token_id": 0}


_QUICK = {"d_model": 64, "d_ff": 128, "vocab_size": 320, "max_target_len": 64}
_QUICK_DECODER = {**_QUICK, "num_heads": 4, "num_decoder_layers": 2}
_QUICK_LLAMA = {**_QUICK_DECODER, "num_kv_heads": 1, "key_dim": 64, "value_dim": 64}
_QUICK_SEQ2SEQ = {**_QUICK_DECODER, "num_encoder_layers": 2, "max_source_len": 64}

SHAPES: Mapping[str, Shape] = {
    "gpt2-124m": Shape(
        precision="fp16",
        ours=_decoder(768, 12, 12, 3072, 50_257)
        | {"positions.kind": "learned", "feed_forward.activation": "gelu_tanh"},
        family="GPT2",
        theirs={},
        quick=_QUICK_DECODER,
    ),
    "marian-base": Shape(
        precision="fp16",
        ours=_seq2seq(512, 8, 6, 2048, 58_101)
        | {
            "positions.kind": "sinusoidal_halves",
            "feed_forward.activation": "silu",
            "output_bias": True,
        }
        | {"scale_embeddings": True, "max_source_len": 512, "max_target_len": 512},
        family="Marian",
        theirs=_their_seq2seq(512, 8, 6, 2048, 58_101, 512)
        | {"activation_function": "swish", "scale_embedding": True, "pad_token_id": 0},
        num_prompt_tokens=32,
        num_new_tokens=32,
        quick=_QUICK_SEQ2SEQ,
    ),
    "bart-large": Shape(
        precision="fp16",
        ours=_seq2seq(1024, 16, 12, 4096, 50_265)
        | {"positions.kind": "learned", "feed_forward.activation": "gelu", "embedding_norm": True}
        | {"max_source_len": 1024},
        family="Bart",
        theirs=_their_seq2seq(1024, 16, 12, 4096, 50_265, 1024),
        quick=_QUICK_SEQ2SEQ,
    ),
    "llama-1b": Shape(
        precision="bf16",
        ours=_llama(2048, 32, 16, 8192, tied=True),
        family="Llama",
        theirs=_their_llama(2048, 32, 16, 8192, tied=True),
        quick=_QUICK_LLAMA,
    ),
    "llama-8b": Shape(
        precision="bf16",
        ours=_llama(4096, 32, 32, 14_336, tied=False),
        family="Llama",
        theirs=_their_llama(4096, 32, 32, 14_336, tied=False),
        quick=_QUICK_LLAMA,
    ),
}


def build(
    name: str,
    directory: Path,
    *,
    quick: bool,
    precision: Precision | None = None,
    weights: Weights | None = None,
) -> Path:
    """Return the directory of a shape's graphs below `directory`, made if it is not there."""
    shape = SHAPES[name]
    form = PackageFormat.of("cuda", precision or shape.precision, weights)
    kind = f"{form.precision}-{form.weights}"
    path = directory / f"{name}{'-quick' if quick else ''}" / kind
    if not path.is_dir():
        config = TransformerConfig.of({**shape.ours, **(shape.quick if quick else {})})
        unfinished = path.with_name(f"{kind}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write(config, form, unfinished)
        unfinished.rename(path)
    return path


def _write(config: TransformerConfig, form: PackageFormat, path: Path) -> None:
    model = draw_model(config, DTYPES[form.precision])
    graphs = build_graphs(model, target=target_of(form), precision=form.precision)
    for graph in graphs.values():
        quantize(graph, form)
    write_graphs(graphs, path)
    contract = generation_contract(config, form)
    assert contract is not None, "shapes are of models that generate"
    write_contract(contract, path)


def draw_model(config: TransformerConfig, dtype: torch.dtype) -> nn.Module:
    """Return a model on the CPU, drawn where that takes least time: 8e9 numbers are many."""
    torch.manual_seed(_SEED)
    with default_dtype(dtype), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = build_model(config)
    model = model.eval().cpu()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return model


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new parameters of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
