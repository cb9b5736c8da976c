"""Faults that hardly change a logit are told from rounding; the right model beside each passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest

from exporter.export import export_package
from tests.exporter.prover.surgery import DECODERS, Mutation, Spoil, Surgery, refuse
from tests.exporter.test_export_for_cuda import LLAMA

pytestmark = pytest.mark.usefixtures("few_cases")

EPSILON = {"norm_eps": 1e-6}
ROTARY = {**LLAMA, **EPSILON}
WINDOW = {"attention.window": 4}
GELU = {"feed_forward.activation": "gelu", **EPSILON}
LABELLER = {  # as published ones are
    **GELU,
    "attention.score": "dot",
    "attention.normalizer": "softmax",
    "positions.kind": "learned",
    "labels": ("NOUN", "VERB", "ADJ"),
}
PLACES = ((5, 16), (9, 16))  # sizes of the tables of positions: of images, and of texts
CHUNK, LAST = 3, 11  # the tiny GPT's: a chunk's length, and the last place of a row


class Small(NamedTuple):
    """A fault, the model that has it, and where it is seen."""

    family: str
    options: dict[str, Any]
    file: str
    mutate: Mutation
    seen: str  # the quantile of the first refusal
    times: float  # at least: what the eager model loses there


def _query_projection(surgery: Surgery, op_type: str) -> tuple[str, str]:
    """Return the weight and the bias by which the first layer makes queries."""
    biased = surgery.producer(surgery.nodes(op_type)[0].input[0])
    names = {tensor.name for tensor in surgery.model.graph.initializer}
    product = next(surgery.producer(name) for name in biased.input if name not in names)
    return product.input[1], next(name for name in biased.input if name in names)


def head_scaled(factor: float, op_type: str = "CachedAttention", width: int = 8) -> Mutation:
    """The scale of the first head of the first layer is so many times too large."""

    def mutate(surgery: Surgery) -> None:
        def scaled(weight: np.ndarray) -> np.ndarray:
            weight[..., :width] *= factor
            return weight

        for name in _query_projection(surgery, op_type):
            surgery.change_weight(name, scaled)

    return mutate


def residual_scaled(surgery: Surgery) -> None:
    """The first layer adds its attention to a sum that is 0.1 % too large there."""
    names = {tensor.name for tensor in surgery.model.graph.initializer}
    sums = [node for node in surgery.nodes("Add") if not names & set(node.input)]
    larger = surgery.compute_before(sums[0], "Mul", sums[0].input[0], np.float32([1.001]))
    sums[0].input[0] = larger


def epsilon_tenfold(surgery: Surgery) -> None:
    for node in surgery.model.graph.node:
        if node.op_type.endswith(("LayerNormalization", "RMSNormalization")):
            surgery.set_attribute(node, "epsilon", 1e-5)


def base_of_10001(surgery: Surgery) -> None:
    """The angles of rotary positions: place times base ** (-i / 8)."""
    places, i = np.arange(LAST + 1)[:, None], np.arange(8) / 8
    angles = places * 10_001.0**-i
    for kind, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
        name = next(
            t.name for t in surgery.model.graph.initializer if t.name.endswith(f"rotary.{kind}")
        )
        surgery.change_weight(name, lambda old, table=table: _near(table, old))


def _near(table: np.ndarray, old: np.ndarray) -> np.ndarray:
    assert table.shape == old.shape and 0 < np.abs(table - old).max() < 1e-3
    return table.astype(np.float32)


def other_gelu(surgery: Surgery) -> None:
    node = surgery.nodes("Gelu")[0]
    (kind,) = (a.s for a in node.attribute if a.name == "approximate")
    surgery.set_attribute(node, "approximate", "tanh" if kind == b"none" else "none")


def places_off_by_one(surgery: Surgery) -> None:
    """Every place but the first takes the row of the one behind it."""
    (name,) = (t.name for t in surgery.model.graph.initializer if tuple(t.dims) in PLACES)
    surgery.change_weight(name, lambda w: np.concatenate([w[:1], w[2:], w[-1:]]))


def patches_swapped(surgery: Surgery) -> None:
    order = surgery.nodes("Gather")[0].input[1]  # behind the class token
    surgery.change_weight(order, lambda w: w[[0, 2, 1, 3, 4]])


def bias_of_a_label(surgery: Surgery) -> None:
    surgery.change_weight("model.classifier.bias", lambda w: w * np.float32([1, 1.001, 1]))


def window_of_5(surgery: Surgery) -> None:
    surgery.set_attribute(surgery.nodes("WindowedCachedAttention")[1], "window", 5)


def position_behind_a_chunk_off_by_one(surgery: Surgery) -> None:
    node = next(n for n in surgery.nodes("Gather") if n.input[1] == "position_ids")
    one = np.ones(1, np.int64)
    is_single = surgery.compute_before(node, "Sub", one, surgery.is_chunk())
    is_it = surgery.compute_before(node, "Equal", "position_ids", np.array([[CHUNK]]))
    number = surgery.compute_before(node, "Cast", is_it, to=onnx.TensorProto.INT64)
    shift = surgery.compute_before(node, "Mul", number, is_single)
    node.input[1] = surgery.compute_before(node, "Add", "position_ids", shift)


def last_place_unseen(surgery: Surgery) -> None:
    """The mask of the last layer ends a place before a full row does."""
    node = surgery.nodes("CachedAttention")[1]
    most = np.array([LAST - 1], np.int32)
    node.input[3] = surgery.compute_before(node, "Min", "seqlens_k", most)


DECODER, ENCODER, ONE_PASS = "decoder.onnx", "encoder.onnx", "model.onnx"
MEDIAN, P90 = "median", "90th percentile"
FAULTS: dict[str, Small] = {
    "head by 0.1 %": Small("gpt", {}, DECODER, head_scaled(1.001), MEDIAN, 200),
    "head by 1 %": Small("gpt", {}, DECODER, head_scaled(1.01), MEDIAN, 2000),
    "head of a decoder with sources": Small(
        "encoder-decoder", {}, DECODER, head_scaled(1.001), MEDIAN, 4
    ),
    "head of the attention to sources": Small(
        "encoder-decoder", {}, DECODER, head_scaled(1.001, "CrossAttention"), MEDIAN, 50
    ),
    "head of an encoder": Small(
        "encoder-decoder", {}, ENCODER, head_scaled(1.001, "Attention"), MEDIAN, 100
    ),
    "head of texts": Small("bert", {}, ONE_PASS, head_scaled(1.001, "Attention"), MEDIAN, 200),
    "head of images": Small("vit", {}, ONE_PASS, head_scaled(1.001, "Attention"), MEDIAN, 200),
    "residual": Small("gpt", {}, DECODER, residual_scaled, MEDIAN, 1000),
    "residual of an encoder": Small("encoder-decoder", {}, ENCODER, residual_scaled, MEDIAN, 500),
    "residual of texts": Small("bert", {}, ONE_PASS, residual_scaled, MEDIAN, 500),
    "epsilon": Small("gpt", EPSILON, DECODER, epsilon_tenfold, MEDIAN, 50),
    "epsilon of root mean squares": Small("gpt", ROTARY, DECODER, epsilon_tenfold, MEDIAN, 50),
    "epsilon of texts": Small("bert", EPSILON, ONE_PASS, epsilon_tenfold, MEDIAN, 4),
    "rotary base": Small("gpt", ROTARY, DECODER, base_of_10001, MEDIAN, 3),
    "gelu": Small("gpt", {}, DECODER, other_gelu, MEDIAN, 100),
    "gelu of texts": Small("bert", {}, ONE_PASS, other_gelu, MEDIAN, 100),
    "epsilon of images": Small("vit", GELU, ONE_PASS, epsilon_tenfold, MEDIAN, 50),
    "gelu of images": Small("vit", GELU, ONE_PASS, other_gelu, MEDIAN, 200),
    "places of images": Small("vit", GELU, ONE_PASS, places_off_by_one, MEDIAN, 100_000),
    "patches": Small("vit", GELU, ONE_PASS, patches_swapped, MEDIAN, 100_000),
    "label of images": Small("vit", GELU, ONE_PASS, bias_of_a_label, MEDIAN, 500),
    "head of a labeller": Small(
        "labeller", LABELLER, ONE_PASS, head_scaled(1.001, "Attention"), MEDIAN, 200
    ),
    "epsilon of a labeller": Small("labeller", LABELLER, ONE_PASS, epsilon_tenfold, MEDIAN, 4),
    "gelu of a labeller": Small("labeller", LABELLER, ONE_PASS, other_gelu, MEDIAN, 100),
    "places of a labeller": Small(
        "labeller", LABELLER, ONE_PASS, places_off_by_one, MEDIAN, 100_000
    ),
    "label of tokens": Small("labeller", LABELLER, ONE_PASS, bias_of_a_label, MEDIAN, 300),
    "window": Small("gpt", WINDOW, DECODER, window_of_5, MEDIAN, 10_000),
    "behind a chunk": Small("gpt", {}, DECODER, position_behind_a_chunk_off_by_one, MEDIAN, 10_000),
    "last place": Small("gpt", {}, DECODER, last_place_unseen, P90, 5000),
}
RIGHT = [
    *((family, {}) for family in ("encoder-decoder", "gpt", "bert", "labeller", "vit")),
    *(("gpt", options) for options in (EPSILON, ROTARY, WINDOW)),
    ("bert", EPSILON),
    ("vit", GELU),
    ("labeller", LABELLER),
]


@pytest.mark.parametrize("name", FAULTS)
def test_a_small_fault_is_refused_and_told_in_times_of_what_the_eager_model_loses(
    name: str, spoil: Spoil, tmp_path: Path
) -> None:
    fault = FAULTS[name]
    checkpoint = spoil(fault.family, fault.file, fault.mutate, **fault.options)

    found = refuse(checkpoint, tmp_path, "logits are")

    told = re.search(rf"the {fault.seen} of all positions \(alone\) is \S+, (\S+) times", found)
    assert told is not None and float(told[1]) > fault.times, found


@pytest.mark.parametrize(("family", "options"), RIGHT)
def test_the_right_model_gets_a_certificate_well_within_its_bounds(
    family: str, options: dict[str, Any], spoil: Spoil, tmp_path: Path
) -> None:
    file = DECODER if family in DECODERS else ONE_PASS
    checkpoint = spoil(family, file, lambda surgery: None, **options)

    found = export_package(checkpoint, tmp_path / "package").certificate

    assert found.batch_invariant and found.tokens_equal == found.tokens_compared > 0
    assert all(one.exported.median <= max(2 * one.eager.median, one.floor) for one in found.judged)
