"""Attention that is wrong gets no certificate, and leaves no package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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


# Attention


@decoder
def scale_missing(surgery: Surgery) -> None:
    surgery.set_attribute(surgery.nodes("CachedAttention")[1], "scale", 1.0)


@decoder
def scale_of_d_model(surgery: Surgery) -> None:
    surgery.set_attribute(surgery.nodes("CachedAttention")[0], "scale", 16**-0.5)


@cross_decoder
def scale_of_padded_heads(surgery: Surgery) -> None:
    for node in (*surgery.nodes("CachedAttention"), *surgery.nodes("CrossAttention")):
        surgery.set_attribute(node, "scale", 8**-0.5)


@cross_decoder
def cross_scale_given_twice(surgery: Surgery) -> None:
    surgery.set_attribute(surgery.nodes("CrossAttention")[0], "scale", 0.5)


@encoder
def encoder_scale_missing(surgery: Surgery) -> None:
    surgery.set_attribute(surgery.nodes("Attention")[0], "scale", 1.0)


@decoder
def causal_flag_lost(surgery: Surgery) -> None:
    (function,) = (f for f in surgery.model.functions if f.name == "CachedAttention")
    surgery.set_attribute(function.node[0], "causal", 0)


@encoder
def encoder_made_causal(surgery: Surgery) -> None:
    surgery.set_attribute(surgery.nodes("Attention")[1], "is_causal", 1)


@decoder
def query_and_key_swapped(surgery: Surgery) -> None:
    def swap(packed: np.ndarray) -> np.ndarray:
        query, key, value = np.split(packed, 3, axis=-1)
        return np.concatenate([key, query, value], axis=-1)

    product = surgery.producer(surgery.nodes("CachedAttention")[0].input[0])
    surgery.change_weight(product.input[1], swap)
    surgery.change_weight(surgery.producer(product.input[0]).input[1], swap)


@decoder
def heads_permuted(surgery: Surgery) -> None:
    attended = surgery.nodes("CachedAttention")[0].output[0]
    projection = next(node for node in surgery.nodes("MatMul") if node.input[0] == attended)
    surgery.change_weight(projection.input[1], lambda w: np.roll(w, len(w) // 2, axis=0))


@cross_decoder
def cross_lengths_ignored(surgery: Surgery) -> None:
    lengths = surgery.compute("Mul", "source_lengths", np.int64(0).reshape(1))
    full = surgery.compute_before(
        surgery.nodes("CrossAttention")[0], "Add", lengths, np.int64(9).reshape(1)
    )
    surgery.replace_uses("source_lengths", full, of="CrossAttention")


@cross_decoder
def cross_mask_off_by_one(surgery: Surgery) -> None:
    longer = surgery.compute("Add", "source_lengths", np.int64(1).reshape(1))
    capped = surgery.compute_before(
        surgery.nodes("CrossAttention")[0], "Min", longer, np.int64(9).reshape(1)
    )
    surgery.replace_uses("source_lengths", capped, of="CrossAttention")


@cross_decoder
def last_source_position_unseen(surgery: Surgery) -> None:
    shorter = surgery.compute("Sub", "source_lengths", np.int64(1).reshape(1))
    capped = surgery.compute_before(
        surgery.nodes("CrossAttention")[0], "Max", shorter, np.int64(1).reshape(1)
    )
    surgery.replace_uses("source_lengths", capped, of="CrossAttention")


# The alignment: no logit depends on it


@cross_decoder
def alignment_scale_given_twice(surgery: Surgery) -> None:
    surgery.set_attribute(surgery.nodes("CrossAlignment")[0], "scale", 0.5)


@cross_decoder
def alignment_of_another_layer(surgery: Surgery) -> None:
    (node,) = surgery.nodes("CrossAlignment")
    node.input[1] = "cross_key_values.0.key"


@cross_decoder
def alignment_sees_behind_the_source(surgery: Surgery) -> None:
    (node,) = surgery.nodes("CrossAlignment")
    longer = surgery.compute_before(node, "Add", "source_lengths", np.int64(1).reshape(1))
    node.input[2] = surgery.compute_before(node, "Min", longer, np.int64(9).reshape(1))


@cross_decoder
def alignment_of_the_first_position_only(surgery: Surgery) -> None:
    (node,) = surgery.nodes("CrossAlignment")
    node.input[3] = surgery.compute_before(node, "Mul", "alignment_idx", np.int64(0).reshape(1))


@pytest.mark.parametrize(("family", "name"), MUTANTS.cases)
def test_a_faulty_graph_is_refused_and_leaves_nothing(
    family: str, name: str, spoil: Spoil, tmp_path: Path
) -> None:
    found = refuse(spoil(family, *MUTANTS[family, name]), tmp_path)

    assert "alignment" in found or not name.startswith("alignment")
