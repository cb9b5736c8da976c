"""Embeddings, layers and heads that are wrong get no certificate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from exporter.checkpoint import load_checkpoint
from exporter.graphs import rewrite
from exporter.graphs import torch_export as graphs_module
from exporter.models.attention import MultiHeadAttention
from exporter.models.layers import Decoder
from tests.exporter.conftest import MakeCheckpoint
from tests.exporter.prover.surgery import (
    DECODERS,
    Mutants,
    Spoil,
    Surgery,
    refuse,
)

pytestmark = pytest.mark.usefixtures("few_cases")

MUTANTS = Mutants()
decoder = MUTANTS.of(*DECODERS, file="decoder.onnx")
cross_decoder = MUTANTS.of("encoder-decoder", file="decoder.onnx")
encoder = MUTANTS.of("encoder-decoder", file="encoder.onnx")


# Positions and embeddings


@decoder
def position_offset(surgery: Surgery) -> None:
    later = surgery.compute("Add", "position_ids", np.int64(1).reshape(1, 1))
    limit = np.int64(6 if len(surgery.nodes("Gather")) and _is_cross(surgery) else 11)
    capped = surgery.compute_before(surgery.nodes("Gather")[0], "Min", later, limit.reshape(1, 1))
    surgery.replace_uses("position_ids", capped, of="Gather")


def _is_cross(surgery: Surgery) -> bool:
    return any(value.name == "source_lengths" for value in surgery.model.graph.input)


def _position_table(surgery: Surgery) -> str:
    weights = {tensor.name for tensor in surgery.model.graph.initializer}
    tables = [n.input[0] for n in surgery.nodes("Gather") if n.input[1] != "input_ids"]
    tables += [n.input[0] for n in surgery.model.graph.node if n.op_type == "Slice"]
    return next(name for name in tables if name in weights)


@encoder
def source_positions_shifted(surgery: Surgery) -> None:
    surgery.change_weight(_position_table(surgery), lambda table: np.roll(table, 1, axis=0))


@decoder
def last_position_wrong(surgery: Surgery) -> None:
    def spoil(table: np.ndarray) -> np.ndarray:
        table[-1] = table[-2]
        return table

    surgery.change_weight(_position_table(surgery), spoil)


@decoder
def position_table_too_short(surgery: Surgery) -> None:
    """onnxruntime loads this one, and runs it until the last position is reached."""
    surgery.change_weight(_position_table(surgery), lambda table: table[:-1])


@cross_decoder
def embedding_scale_missing(surgery: Surgery) -> None:
    surgery.bypass(surgery.nodes("Mul")[0])


@decoder
def last_token_of_the_vocabulary_lost(surgery: Surgery) -> None:
    def spoil(table: np.ndarray) -> np.ndarray:
        table[-1] = 0
        return table

    embedding = next(n for n in surgery.nodes("Gather") if n.input[1] == "input_ids")
    surgery.change_weight(embedding.input[0], spoil)


# Layers


@decoder
def wrong_epsilon(surgery: Surgery) -> None:
    for node in surgery.nodes("LayerNormalization"):
        surgery.set_attribute(node, "epsilon", 1e-5)


@decoder
def final_norm_missing(surgery: Surgery) -> None:
    surgery.bypass(surgery.nodes("LayerNormalization")[-1])


@encoder
def encoder_final_norm_missing(surgery: Surgery) -> None:
    surgery.bypass(surgery.nodes("LayerNormalization")[-1])


@decoder
def relu_instead_of_gelu(surgery: Surgery) -> None:
    node = surgery.nodes("Gelu")[0]
    node.op_type = "Relu"
    del node.attribute[:]


@decoder
def the_other_gelu(surgery: Surgery) -> None:
    for node in surgery.nodes("Gelu"):
        (kind,) = (a.s for a in node.attribute if a.name == "approximate")
        surgery.set_attribute(node, "approximate", "tanh" if kind == b"none" else "none")


@decoder
def bias_dropped(surgery: Surgery) -> None:
    node = surgery.nodes("CachedAttention")[0]
    surgery.bypass(surgery.producer(node.input[0]))


@decoder
def residual_dropped(surgery: Surgery) -> None:
    normed = surgery.nodes("LayerNormalization")[-1].input[0]
    surgery.bypass(surgery.producer(normed), 1)


@decoder
def weights_of_layers_swapped(surgery: Surgery) -> None:
    first, second = (
        surgery.producer(surgery.producer(node.input[0]).input[0])
        for node in surgery.nodes("CachedAttention")
    )
    first.input[1], second.input[1] = second.input[1], first.input[1]


@decoder
def one_weight_off(surgery: Surgery) -> None:
    def spoil(weight: np.ndarray) -> np.ndarray:
        weight[1, 1] += 0.02
        return weight

    surgery.change_weight(surgery.nodes("MatMul")[0].input[1], spoil)


@decoder
def weights_rounded_to_bf16(surgery: Surgery) -> None:
    def rounded(weight: np.ndarray) -> np.ndarray:
        bits = weight.view(np.uint32)
        return ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)

    for node in surgery.nodes("MatMul"):
        surgery.change_weight(node.input[1], rounded)


@decoder
def head_count_forgotten(surgery: Surgery) -> None:
    """onnxruntime does not load this one."""
    surgery.set_attribute(surgery.nodes("CachedAttention")[0], "num_heads", 3)


# The head


@decoder
def untied_head(surgery: Surgery) -> None:
    (head,) = surgery.nodes("Gemm")
    rng = np.random.default_rng(0)
    shape = next(t.dims for t in surgery.model.graph.initializer if t.name == head.input[1])
    head.input[1] = surgery.constant(rng.normal(size=tuple(shape)).astype(np.float32) / 4)


@cross_decoder
def output_bias_dropped(surgery: Surgery) -> None:
    del surgery.nodes("Gemm")[0].input[2]


@decoder
def logit_idx_ignored(surgery: Surgery) -> None:
    first = surgery.compute("Mul", "logit_idx", np.int64(0).reshape(1))
    surgery.replace_uses("logit_idx", first, of="Gather")


@decoder
def vocabulary_shifted(surgery: Surgery) -> None:
    (head,) = surgery.nodes("Gemm")
    weight = next(t for t in surgery.model.graph.initializer if t.name == head.input[1])
    head.input[1] = surgery.constant(np.roll(numpy_helper.to_array(weight), 1, axis=0))


@decoder
def rows_see_each_other(surgery: Surgery) -> None:
    """The fault of an activation scale per tensor, too small for any tolerance."""
    node = surgery.nodes("Gemm")[0]
    largest = surgery.compute_before(node, "ReduceMax", node.input[0])
    trace = surgery.compute_before(node, "Mul", largest, np.array([[1e-6]], np.float32))
    node.input[0] = surgery.compute_before(node, "Add", node.input[0], trace)


@pytest.mark.parametrize(("family", "name"), MUTANTS.cases)
def test_a_faulty_graph_is_refused_and_leaves_nothing(
    family: str, name: str, spoil: Spoil, tmp_path: Path
) -> None:
    refuse(spoil(family, *MUTANTS[family, name]), tmp_path)


# Faults of the exporter's own steps


def values_before_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = rewrite._joined
    monkeypatch.setattr(rewrite, "_joined", lambda op, name, q, k, v: joined(op, name, q, v, k))


def output_columns_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    widened = graphs_module._widened

    def wrong(weight: Tensor, num_heads: int, width: int) -> nn.Parameter:
        if weight.is_contiguous():  # no columns
            return widened(weight, num_heads, width)
        return nn.Parameter(functional.pad(weight, (0, 0, 0, num_heads * width - len(weight))))

    monkeypatch.setattr(graphs_module, "_widened", wrong)


def scale_follows_the_widened_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    widen = graphs_module.widen_heads

    def wrong(decoder: Decoder) -> None:
        widen(decoder)
        for attention in decoder.modules():
            if isinstance(attention, MultiHeadAttention):
                attention.scale = attention.key_dim**-0.5

    monkeypatch.setattr(graphs_module, "widen_heads", wrong)


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize(
    "fault", [values_before_keys, output_columns_not_widened, scale_follows_the_widened_heads]
)
def test_a_fault_of_the_exporter_is_refused_and_leaves_nothing(
    fault: Callable[[pytest.MonkeyPatch], None],
    make_checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint("gpt", num_decoder_layers=1, key_dim=6, value_dim=5)
    fault(monkeypatch)

    refuse(load_checkpoint(checkpoint), tmp_path)


@pytest.mark.parametrize(
    ("family", "file", "options"),
    [
        ("gpt", "decoder.onnx", {"vocab_size": 5000, "tie_output": False}),
        pytest.param("bert", "model.onnx", {"vocab_size": 5000}, marks=pytest.mark.long),
    ],
)
def test_a_large_vocabulary_that_was_cut_is_refused(
    family: str, file: str, options: dict[str, object], spoil: Spoil, tmp_path: Path
) -> None:
    refuse(spoil(family, file, last_token_of_the_vocabulary_lost, **options), tmp_path)
