"""Rounding excuses no fault: graphs are proven before, and the cost of rounding is counted."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import CertificateError
from engine.package.manifest import CacheDtype, Weights
from exporter import export
from exporter.checkpoint import load_checkpoint, save_checkpoint
from exporter.graphs import package_graphs
from exporter.models import GPT
from tests.exporter.conftest import MakeCheckpoint, TinyGraphs
from tests.exporter.prover import test_faults_of_attention as attention
from tests.exporter.prover import test_faults_of_rows as rows
from tests.exporter.prover.surgery import PLACE, Mutants, Mutation, Spoil, Surgery, spoiled

pytestmark = pytest.mark.usefixtures("few_cases")

MUTANTS = Mutants(attention.MUTANTS | rows.MUTANTS)

# A cache in 8 bits: differences are counted


@pytest.fixture(scope="module")
def uneven_checkpoint(
    make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A GPT whose second layer writes keys and values ten times as large as the first's."""
    loaded = load_checkpoint(make_checkpoint("gpt"))
    model = loaded.model
    assert isinstance(model, GPT)
    attention = model.decoder.layers[1].self_attention
    with torch.no_grad():
        for projection in (attention.k_proj, attention.v_proj):
            for parameter in projection.parameters():
                parameter *= 10
        for parameter in attention.q_proj.parameters():
            parameter /= 10
        attention.out_proj.weight /= 10
    path = tmp_path_factory.mktemp("uneven") / "tiny"
    save_checkpoint(path, "tiny", model, loaded.tokenizer)
    return path


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_the_scale_of_one_layer_used_for_all_loses_more_than_is_allowed(
    uneven_checkpoint: Path, is_spoilt: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quantize_cache = package_graphs.quantize_cache
    if is_spoilt:
        monkeypatch.setattr(
            package_graphs,
            "quantize_cache",
            lambda decoder, scales, *functions: quantize_cache(
                decoder, [scales[0]] * len(scales), *functions
            ),
        )

    with pytest.raises(CertificateError, match="loss") if is_spoilt else nullcontext():
        export.export_package(uneven_checkpoint, tmp_path / "package", kv_cache="int8")

    assert (tmp_path / "package").exists() != is_spoilt


# Weights in 8 bits: a row may depend on its neighbours, but not lose more than is allowed


def _embeddings_zeroed(surgery: Surgery) -> None:
    surgery.zero_rows("embedding", 1, 2)


def _later_rows_zeroed(surgery: Surgery) -> None:
    surgery.zero_rows("logits", 2, 2)


def _alignment_zeroed(surgery: Surgery) -> None:
    surgery.zero_rows("alignment", 1, 2)


def _alignment_of_the_first_token(surgery: Surgery) -> None:
    def wrong(old: str) -> str:
        turned = surgery.compute_before(surgery.last, "Transpose", old, perm=[1, 0])
        first = surgery.is_row(surgery.last, "Less", turned, 2, 2)
        nothing = surgery.compute_before(surgery.last, "Mul", turned, np.zeros(1, np.float32))
        shares = surgery.compute_before(surgery.last, "Add", nothing, first)
        return surgery.compute_before(surgery.last, "Transpose", shares, perm=[1, 0])

    surgery.change_output("alignment", wrong)


@pytest.mark.parametrize(
    ("family", "file", "mutate", "message"),
    [
        (
            "bert",
            "model.onnx",
            _embeddings_zeroed,
            "1 less the cosine of an embedding .* at the most 1, allowed 0.03; .*-vector-loss",
        ),
        (
            "vit",
            "model.onnx",
            _embeddings_zeroed,
            "1 less the cosine of an embedding .* at the most 1, allowed 0.03; .*-vector-loss",
        ),
        ("vit", "model.onnx", _later_rows_zeroed, "of 87 labels are not the eager model's"),
        ("encoder-decoder", "decoder.onnx", _alignment_zeroed, "add up to 0"),
        pytest.param(
            "encoder-decoder",
            "decoder.onnx",
            _alignment_of_the_first_token,
            "share of the attention",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "encoder-decoder",
            "decoder.onnx",
            rows.thirteen_rows_aligned_wrongly,
            "add up to",
            marks=pytest.mark.long,
        ),
        (
            "encoder-decoder",
            "encoder.onnx",
            rows.sources_of_groups_of_seven_zeroed,
            "difference is",
        ),
        pytest.param(
            "encoder-decoder",
            "encoder.onnx",
            rows.thirteen_sources_wrong,
            "difference is",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "encoder-decoder",
            "decoder.onnx",
            rows.logits_of_thirteen_rows_wrong,
            "difference is",
            marks=pytest.mark.long,
        ),
    ],
)
def test_weights_in_8_bits_excuse_no_output_that_is_wrong(
    family: str,
    file: str,
    mutate: Mutation,
    message: str,
    tiny_graphs: TinyGraphs,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    checkpoint, _ = tiny_graphs(family)

    def write_mutant(*given: Any, **options: Any) -> None:
        quantized = package_graphs.build_package_graphs(*given[:2], **options)
        package_graphs.write_graphs(spoiled(quantized, file, mutate), given[2])

    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: tiny_graphs(family)[1])
    monkeypatch.setattr(export, "write_package_graphs", write_mutant)

    with pytest.raises(CertificateError, match=message):
        export.export_package(checkpoint, tmp_path / "package", weights="int8", kv_cache="fp32")

    assert list(tmp_path.iterdir()) == []


# Before anything is rounded: some faults change less than rounding may


SMALLER_THAN_ROUNDING = [
    ("encoder-decoder", "scale_missing"),
    ("encoder-decoder", "encoder_made_causal"),
    ("encoder-decoder", "lengths_of_rows_swapped"),
    ("encoder-decoder", "alignment_scale_given_twice"),
    ("gpt", "causal_flag_lost"),
]


@pytest.mark.parametrize(("family", "name"), SMALLER_THAN_ROUNDING)
@pytest.mark.parametrize(("weights", "kv_cache"), [("int8", "fp32"), ("fp32", "int8")])
def test_a_format_that_rounds_excuses_no_faulty_graph(
    family: str,
    name: str,
    weights: Weights,
    kv_cache: CacheDtype,
    spoil: Spoil,
    tmp_path: Path,
) -> None:
    checkpoint = spoil(family, *MUTANTS[family, name])

    with pytest.raises(CertificateError, match=f"before anything is rounded: .*({PLACE})"):
        export.export_package(checkpoint, tmp_path / "package", weights=weights, kv_cache=kv_cache)

    assert list(tmp_path.iterdir()) == []
