"""Graphs for CUDA, on the emulated device: every node runs there, and a call can be captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.package.manifest import Precision
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.target import CUDA
from exporter.graphs.torch_export import build_graphs
from exporter.models import ImageConfig, TransformerConfig, build_model
from tests.emulated.conftest import RunScript

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]

_VOCABULARY = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {"d_model": 64, "num_heads": 2, "d_ff": 128}
_TRANSLATION = {
    **_VOCABULARY,
    **_SMALL,
    "family": "encoder-decoder",
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "max_source_len": 48,
    "max_target_len": 48,
}
_GPT2 = {
    **_VOCABULARY,
    "family": "gpt",
    "d_model": 128,
    "num_heads": 2,
    "d_ff": 256,
    "num_decoder_layers": 2,
    "max_target_len": 64,
    "positions": "learned",
    "activation": "gelu_tanh",
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
    "positions": "rotary",
    "activation": "silu",
    "gated_feed_forward": True,
    "norm": "rms",
    "attention_bias": False,
    "feed_forward_bias": False,
    "tie_output": False,
}
_NO_BIASES = {"norm": "rms", "attention_bias": False, "feed_forward_bias": False}
_T5 = {
    **_TRANSLATION,
    **_NO_BIASES,
    "norm_position": "first",
    "positions": "relative",
    "attention_scale": 1.0,
    "activation": "gelu_tanh",
    "gated_feed_forward": True,
    "scale_embeddings": False,
}
_READER = {**_VOCABULARY, **_SMALL, "num_encoder_layers": 2, "max_source_len": 48}
_SENTENCES = {**_READER, "family": "bert", "pooler": "none"}  # for each of them a vector
MODELS: dict[str, dict[str, Any]] = {
    "dates": _TRANSLATION,
    "marian": {
        **_TRANSLATION,
        "positions": "sinusoidal_halves",
        "activation": "silu",
        "output_bias": True,
    },
    "t5": _T5,
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "gemma2": {**_LLAMA, "window": 16, "windowed_layers": (0,), "attention_softcap": 50.0},
    "sentiment": {
        **_READER,
        "family": "bert",
        "positions": "learned",
        "activation": "gelu",
        "embedding_norm": True,
        "num_token_types": 2,
        "scale_embeddings": False,
        "labels": ("a", "b"),
    },
    "sentences": {**_SENTENCES, "pooling": "mean", "normalize": True},
    "sentences-max": {**_SENTENCES, "pooling": "max"},
    "tagging": {**_READER, "family": "labeller", "labels": ("a", "b")},
    "digits": {
        **_SMALL,
        "family": "vit",
        "num_encoder_layers": 2,
        "norm_position": "first",
        "positions": "learned",
        "image": ImageConfig(size=16, patch_size=4, channels=1, mean=(0.5,), std=(0.5,)),
        "labels": ("a", "b"),
    },
}
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16")
# Of a decode step of 12 layers in half precision, with the vocabulary of the real model.
MOST_LAUNCHES = {("gpt2", 50_257): 142, ("llama", 128_256): 153}


def export(name: str, precision: Precision, directory: Path, **options: Any) -> list[str]:
    torch.manual_seed(0)
    model = build_model(TransformerConfig.model_validate({**MODELS[name], **options})).eval()
    directory.mkdir()
    graphs = build_graphs(model, target=CUDA, precision=precision)
    write_graphs(graphs, directory)
    return [str(directory / file) for file in graphs]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_node_is_on_the_device_and_every_graph_runs_and_can_be_captured(
    precision: str, on_device: RunScript, tmp_path: Path
) -> None:
    paths = [path for name in MODELS for path in export(name, precision, tmp_path / name)]

    found = on_device("look_at_graph.py", *paths)

    assert {path: seen["refused"] for path, seen in found.items()} == dict.fromkeys(paths)


@pytest.mark.parametrize(("name", "vocab_size"), MOST_LAUNCHES)
def test_a_decode_step_has_few_launches(
    name: str, vocab_size: int, on_device: RunScript, tmp_path: Path
) -> None:
    options = {"num_decoder_layers": 12, "vocab_size": vocab_size}
    (path,) = export(name, "fp16", tmp_path / name, **options)

    found = on_device("look_at_graph.py", path)

    assert found[path]["launches"] <= MOST_LAUNCHES[name, vocab_size]
