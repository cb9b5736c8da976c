"""Tiny checkpoints of every family, with weights so large that any fault shows in the logits."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from engine.requests.generation_defaults import GenerationDefaults
from exporter.checkpoint import load_checkpoint, save_checkpoint
from exporter.graphs.torch_export import Graphs
from exporter.models import ImageConfig, TransformerConfig, build_model
from exporter.models.layers import OUTPUT_BIAS
from exporter.prover import cases, generation_cases, item_cases
from exporter.prover.plays import program
from tests.fakes.traces import Trace, traced, traced_anew  # noqa: F401 - fixtures

VOCAB_SIZE = 31
TEXT = {"d_model": 16, "num_heads": 2, "d_ff": 24, "vocab_size": VOCAB_SIZE, "norm_eps": 1e-2}
OPTIONS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {
        "architecture": "encoder-decoder",
        **TEXT,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "key_dim": 6,
        "value_dim": 5,
        "max_source_len": 9,
        "max_target_len": 7,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "feed_forward.activation": "gelu",
        "norm_position": "first",
        "output_bias": True,
    },
    "gpt": {
        "architecture": "decoder",
        **TEXT,
        "num_decoder_layers": 2,
        "max_target_len": 12,
        "positions.kind": "learned",
        "eos_token_id": 2,
        "feed_forward.activation": "gelu_tanh",
        "norm_position": "first",
        "scale_embeddings": False,
    },
    "bert": {
        "architecture": "encoder",
        **TEXT,
        "num_encoder_layers": 2,
        "max_source_len": 9,
        "positions.kind": "learned",
        "feed_forward.activation": "gelu",
        "embedding_norm": True,
        "num_token_types": 2,
        "labels": ("bad", "fair", "good"),
    },
    "labeller": {
        "architecture": "encoder",
        "head.each_token": True,
        **TEXT,
        "num_encoder_layers": 2,
        "max_source_len": 9,
        "attention.score": "additive",
        "attention.normalizer": "relu",
        "labels": ("NOUN", "VERB"),
    },
    "vit": {
        "architecture": "vision-encoder",
        "d_model": 16,
        "num_heads": 2,
        "d_ff": 24,
        "num_encoder_layers": 2,
        "norm_position": "first",
        "positions.kind": "learned",
        "image": ImageConfig(size=4, patch_size=2, channels=1, mean=(0.5,), std=(0.5,)),
        "labels": ("0", "1", "2"),
    },
}

MakeCheckpoint = Callable[..., Path]
TinyGraphs = Callable[..., tuple[Path, Graphs]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch from waiting for its own threads: models this small have nothing to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def few_cases(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let certificates try two prompts of each length: for tests of what else a package is.

    In a test marked long they try as many as ever; those of the certificate itself do so always.
    """
    if request.node.get_closest_marker("long") is None:
        try_few_cases(monkeypatch)


def try_few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: replace(level, per_length=2) for name, level in cases.LEVELS.items()}
    for module in (cases, generation_cases, item_cases, program):
        monkeypatch.setattr(module, "LEVELS", few)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Write the tiny checkpoint of a family, with options of its configuration changed."""

    def make(family: str, **options: Any) -> Path:
        config = TransformerConfig.of({**OPTIONS[family], **options})
        model = build_model(config)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                spread = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.3
                centre = 1.0 if "norm.weight" in name else 0.0
                weight.copy_(centre + spread * torch.randn(weight.shape))
        path = tmp_path_factory.mktemp("checkpoint") / "tiny"
        save_checkpoint(path, "tiny", model, None if family == "vit" else _tokenizer())
        return path

    return make


@pytest.fixture(scope="session")
def tiny_graphs(
    make_checkpoint: MakeCheckpoint,
    traced: Trace,  # noqa: F811 - the fixture
) -> TinyGraphs:
    """Give the tiny checkpoint of a family and its graphs, to be changed at will."""

    @functools.cache
    def export(family: str, **options: Any) -> tuple[Path, dict[str, onnx.ModelProto]]:
        path = make_checkpoint(family, **options)
        graphs = traced(load_checkpoint(path).model)
        return path, {name: ir.to_proto(graph) for name, graph in graphs.items()}

    def give(family: str, **options: Any) -> tuple[Path, Graphs]:
        path, graphs = export(family, **options)
        return path, {name: ir.from_proto(graph) for name, graph in graphs.items()}

    return give


def make_likely_and_ban(path: Path, token_id: int) -> GenerationDefaults:
    """Change a checkpoint: a token is the likeliest everywhere, as OPUS-MT has its padding."""
    weights = safetensors.torch.load_file(path / "model.safetensors")
    weights[OUTPUT_BIAS][token_id] = 100.0
    safetensors.torch.save_file(weights, path / "model.safetensors")
    defaults = GenerationDefaults(banned_tokens=(token_id,))
    config = json.loads((path / "config.json").read_text())
    config["generation"] = defaults.model_dump(mode="json")
    (path / "config.json").write_text(json.dumps(config))
    return defaults


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer
