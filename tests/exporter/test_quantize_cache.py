"""Keys and values in 8 bits: their scales, what they lose, who holds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from engine.errors import CheckpointError
from engine.package.manifest import PackageFormat
from engine.package.package import load_package
from engine.slots.rows import SlotCache
from exporter.certificate.loss import LossLimits
from exporter.checkpoint import load_checkpoint
from exporter.export import export_package
from exporter.graphs import package_graphs
from exporter.graphs.cache_int8 import CacheScale, calibrate, quantize_cache
from exporter.graphs.contracts import generation_contract
from exporter.graphs.target import CUDA
from exporter.graphs.torch_export import Graphs
from exporter.models import GPT
from exporter.verification import verify_package

TinyGraphs = Callable[[str], tuple[Path, Graphs]]
MakeCheckpoint = Callable[..., Path]

ANY_LOSS = LossLimits(max_token_loss=1, max_logit_loss=100, max_perplexity_loss=100)
LLAMA = {
    "positions": "rotary",
    "norm": "rms",
    "num_heads": 4,
    "num_kv_heads": 2,
    "d_model": 64,
    "attention_bias": False,
}


@pytest.mark.parametrize("family", ["gpt", "encoder-decoder"])
def test_a_cache_in_8_bits_is_near_the_eager_model(
    family: str, tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint, graphs = tiny_graphs(family)
    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: graphs)

    export_package(checkpoint, tmp_path / "package", kv_cache="int8", limits=ANY_LOSS)

    manifest = load_package(tmp_path / "package").manifest
    certificate = manifest.certificate
    assert manifest.generation is not None
    assert manifest.generation.cache.dtype == "int8"
    assert certificate.dtype == "fp32, int8 KV cache"
    assert certificate.batch_invariant
    assert certificate.loss is not None
    assert 0 < certificate.loss.mean_abs_logit_diff < certificate.loss.logit_std / 20
    has_alignment = family != "gpt"
    assert (certificate.max_abs_alignment_diff is not None) == has_alignment
    allowed = 0.2 * ANY_LOSS.max_logit_loss if has_alignment else None
    assert certificate.alignment_tolerance == allowed
    assert verify_package(tmp_path / "package", checkpoint).certificate == certificate


def test_weights_and_cache_may_both_be_8_bits(
    tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint, graphs = tiny_graphs("gpt")
    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: graphs)

    export_package(
        checkpoint, tmp_path / "package", weights="int8", kv_cache="int8", limits=ANY_LOSS
    )

    assert load_package(tmp_path / "package").manifest.certificate.dtype == "int8, int8 KV cache"
    graph = onnx.load(tmp_path / "package" / "decoder.onnx", load_external_data=False).graph
    rows = [v for v in (*graph.input, *graph.output) if v.name.endswith((".key", ".value"))]
    assert len(rows) == 2 * 2 * 2
    assert {v.type.tensor_type.elem_type for v in rows} == {onnx.TensorProto.INT8}


@pytest.mark.parametrize(
    ("family", "options"), [("gpt", LLAMA), ("encoder-decoder", {"positions": "relative"})]
)
def test_positions_that_attention_knows_and_shared_heads_are_kept_in_8_bits(
    family: str, options: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(family, **options)

    manifest = export_package(checkpoint, tmp_path / "package", kv_cache="int8", limits=ANY_LOSS)

    loss = manifest.certificate.loss
    assert loss is not None
    assert 0 < loss.mean_abs_logit_diff < loss.logit_std / 20


def test_a_scale_reaches_the_largest_value_that_a_layer_writes(
    make_checkpoint: MakeCheckpoint,
) -> None:
    model = load_checkpoint(make_checkpoint("gpt", num_decoder_layers=1)).model
    assert isinstance(model, GPT)
    contract = generation_contract(model.config)
    assert contract is not None
    (before,) = calibrate(model, contract, [])

    model.decoder.layers[0].self_attention.v_proj.weight.data *= 3
    model.decoder.layers[0].self_attention.v_proj.bias.data *= 3
    (after,) = calibrate(model, contract, [])

    assert after.value == pytest.approx(3 * before.value)
    assert after.key == before.key


def test_a_layer_that_writes_zeros_has_a_scale(make_checkpoint: MakeCheckpoint) -> None:
    model = load_checkpoint(make_checkpoint("gpt", num_decoder_layers=1)).model
    assert isinstance(model, GPT)
    for parameter in model.decoder.layers[0].self_attention.k_proj.parameters():
        parameter.data.zero_()
    contract = generation_contract(model.config)
    assert contract is not None

    (scale,) = calibrate(model, contract, [])

    assert scale.key == 1


def test_the_engine_holds_rows_of_the_contract_s_type(make_checkpoint: MakeCheckpoint) -> None:
    config = load_checkpoint(make_checkpoint("encoder-decoder")).config.model
    contract = generation_contract(config, PackageFormat(kv_cache="int8"))
    assert contract is not None

    cache = SlotCache(2, contract.cache, contract.cross_cache)

    assert {rows.dtype for layer in cache.layers for rows in layer} == {np.dtype(np.int8)}
    assert {rows.dtype for layer in cache.cross_layers for rows in layer} == {np.dtype(np.float32)}


def test_a_model_without_a_cache_has_none_to_round(
    tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint, graphs = tiny_graphs("bert")
    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: graphs)

    with pytest.raises(CheckpointError, match="leave out --kv-cache"):
        export_package(checkpoint, tmp_path / "package", kv_cache="int8")


def test_a_cache_in_8_bits_keeps_the_functions_of_its_target(tiny_graphs: TinyGraphs) -> None:
    """Those for CUDA have no control flow, or a call cannot be captured."""
    _, graphs = tiny_graphs("encoder-decoder")
    decoder = graphs["decoder.onnx"]

    quantize_cache(decoder, [CacheScale(1, 1)] * 2, CUDA.functions["fp16"])

    nodes = {node.op_type for function in decoder.functions.values() for node in function}
    assert "GroupQueryAttention" in nodes
    assert "If" not in nodes
