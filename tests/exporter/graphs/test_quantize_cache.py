"""Keys and values in 8 bits: their scales, what they lose, who holds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from engine.errors import CertificateError, CheckpointError
from engine.package.manifest import CacheDtype, Certificate, PackageFormat, Weights
from engine.package.package import load_package
from engine.slots.rows import SlotCache
from exporter import export
from exporter.certificate import UnroundedError
from exporter.checkpoint import load_checkpoint
from exporter.export import export_package
from exporter.graphs import package_graphs
from exporter.graphs.cache_int8 import CacheScale, calibrate, quantize_cache
from exporter.graphs.contracts import generation_contract
from exporter.graphs.target import CUDA
from exporter.graphs.torch_export import Graphs
from exporter.models import GPT
from exporter.prover.loss import LossLimits
from exporter.verification import verify_package
from tests.exporter.test_export import LLAMA
from tests.fakes.stand_in_certificate import certificate

pytestmark = pytest.mark.usefixtures("few_cases")

TinyGraphs = Callable[[str], tuple[Path, Graphs]]
MakeCheckpoint = Callable[..., Path]

ANY_LOSS = LossLimits(max_token_loss=1, max_logit_loss=100, max_perplexity_loss=100)
LITTLE_LOSS = LossLimits(max_token_loss=1, max_logit_loss=0.5, max_perplexity_loss=1)


@pytest.mark.parametrize("family", ["gpt", pytest.param("encoder-decoder", marks=pytest.mark.long)])
def test_a_cache_in_8_bits_is_near_the_eager_model(
    family: str, tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint, _ = tiny_graphs(family)
    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: tiny_graphs(family)[1])

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
    assert (certificate.loss.max_abs_alignment_diff is not None) == has_alignment
    assert verify_package(tmp_path / "package", checkpoint).certificate == certificate


def test_weights_and_cache_may_both_be_8_bits(
    tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint, _ = tiny_graphs("gpt")
    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: tiny_graphs("gpt")[1])

    export_package(
        checkpoint, tmp_path / "package", weights="int8", kv_cache="int8", limits=ANY_LOSS
    )

    assert load_package(tmp_path / "package").manifest.certificate.dtype == "int8, int8 KV cache"
    graph = onnx.load(tmp_path / "package" / "decoder.onnx", load_external_data=False).graph
    rows = [v for v in (*graph.input, *graph.output) if v.name.endswith((".key", ".value"))]
    assert len(rows) == 2 * 2 * 2
    assert {v.type.tensor_type.elem_type for v in rows} == {onnx.TensorProto.INT8}


@pytest.mark.parametrize(
    ("weights", "said", "kv_cache"),
    [("int8", None, "int8"), ("int8", "fp32", "fp32"), ("int4", None, "fp32")],
)
def test_beside_int8_weights_a_cache_is_int8_unless_it_is_said(
    weights: Weights,
    said: CacheDtype | None,
    kv_cache: CacheDtype,
    tiny_graphs: TinyGraphs,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    checkpoint, graphs = tiny_graphs("gpt")
    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: graphs)
    form = PackageFormat(weights=weights, kv_cache=kv_cache)
    monkeypatch.setattr(export, "prove", lambda *_, **__: certificate(form))

    manifest = export.export_package(
        checkpoint, tmp_path / "package", weights=weights, kv_cache=said, limits=ANY_LOSS
    )

    assert manifest.format == form


@pytest.mark.parametrize(
    ("kind", "caches"), [(UnroundedError, ["int8"]), (CertificateError, ["int8", "fp32"])]
)
def test_what_failed_before_anything_was_rounded_is_not_tried_again_with_another_cache(
    kind: type[CertificateError],
    caches: list[str],
    tiny_graphs: TinyGraphs,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    tried: list[tuple[str, bool]] = []

    def refuse(_: object, path: Path, form: PackageFormat, **options: Any) -> Certificate:
        tried.append((form.kv_cache, options["is_proven_unrounded"]))
        raise kind("wrong")

    checkpoint, graphs = tiny_graphs("gpt")
    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: graphs)
    monkeypatch.setattr(export, "prove", refuse)

    with pytest.raises(kind, match="wrong"):
        export.export_package(checkpoint, tmp_path / "package", weights="int8", limits=ANY_LOSS)

    assert tried == [(cache, cache == "fp32") for cache in caches]


def test_weights_that_are_rounded_alone_where_the_cache_would_lose_too_much(
    tiny_graphs: TinyGraphs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    checkpoint, _ = tiny_graphs("gpt")
    monkeypatch.setattr(package_graphs, "build_graphs", lambda *_, **__: tiny_graphs("gpt")[1])
    cut_off = [CacheScale(1e-3, 1e-3)] * 2
    monkeypatch.setattr(package_graphs, "calibrate", lambda *_: cut_off)

    manifest = export_package(checkpoint, tmp_path / "package", weights="int8", limits=LITTLE_LOSS)

    assert manifest.format == PackageFormat(weights="int8")
    assert load_package(tmp_path / "package").manifest == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["package"]
    assert "package keeps its cache in fp32: in int8, " in caplog.text
    assert "allowed" in caplog.text


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt", LLAMA),
        pytest.param("encoder-decoder", {"positions.kind": "relative"}, marks=pytest.mark.long),
    ],
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
