"""Models of one pass that are wrong get no certificate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.exporter.prover.surgery import (
    Mutants,
    Spoil,
    Surgery,
    refuse,
)

pytestmark = pytest.mark.usefixtures("few_cases")

MUTANTS = Mutants()


# One-pass models


@MUTANTS.of("bert", "vit", file="model.onnx")
def rows_beyond_the_eighth_zeroed(surgery: Surgery) -> None:
    surgery.zero_rows("logits", 9, 2)


@MUTANTS.of("labeller", file="model.onnx")
def labels_beyond_the_eighth_row_zeroed(surgery: Surgery) -> None:
    surgery.zero_rows("logits", 9, 3)


@MUTANTS.of("bert", "labeller", file="model.onnx")
def embedding_of_padded_rows_wrong(surgery: Surgery) -> None:
    def wrong(old: str) -> str:
        tokens = surgery.compute_before(surgery.last, "Shape", "input_ids", start=1, end=2)
        missing = surgery.compute_before(surgery.last, "Sub", tokens, "lengths")
        column = surgery.compute_before(surgery.last, "Reshape", missing, np.array([-1, 1]))
        count = surgery.compute_before(surgery.last, "Cast", column, to=onnx.TensorProto.FLOAT)
        trace = surgery.compute_before(surgery.last, "Mul", count, np.array([1e-3], np.float32))
        return surgery.compute_before(surgery.last, "Add", old, trace)

    surgery.change_output("embedding", wrong)


@MUTANTS.of("bert", "vit", file="model.onnx")
def rows_beyond_the_fourth_zeroed(surgery: Surgery) -> None:
    surgery.zero_rows("logits", 5, 2)


@MUTANTS.of("bert", "labeller", "vit", file="model.onnx")
def embeddings_see_each_other(surgery: Surgery) -> None:
    def wrong(old: str) -> str:
        first = np.array([0], np.int64)
        largest = surgery.compute_before(surgery.last, "ReduceMax", old, first)
        others = surgery.compute_before(surgery.last, "Sub", largest, old)
        trace = surgery.compute_before(surgery.last, "Mul", others, np.array([1e-6], np.float32))
        return surgery.compute_before(surgery.last, "Add", old, trace)

    surgery.change_output("embedding", wrong)


@MUTANTS.of("bert", "labeller", file="model.onnx")
def padding_leaks(surgery: Surgery) -> None:
    everything = surgery.compute("Mul", "lengths", np.int64(0).reshape(1))
    node = surgery.nodes("Unsqueeze")[0]
    full = surgery.compute_before(node, "Add", everything, np.int64(9).reshape(1))
    surgery.replace_uses("lengths", full, of="Unsqueeze")


@MUTANTS.of("bert", file="model.onnx")
def pooler_without_tanh(surgery: Surgery) -> None:
    surgery.nodes("Tanh")[0].op_type = "Identity"


@MUTANTS.of("bert", file="model.onnx")
def token_types_forgotten(surgery: Surgery) -> None:
    normed = surgery.producer(surgery.nodes("LayerNormalization")[0].input[0])
    table = surgery.producer(normed.input[1]).input[0]
    surgery.change_weight(table, lambda w: np.repeat(w[:1], len(w), axis=0))


@MUTANTS.of("bert", "vit", file="model.onnx")
def labels_permuted(surgery: Surgery) -> None:
    surgery.change_weight(surgery.nodes("Gemm")[-1].input[1], lambda w: np.roll(w, 1, axis=0))


@MUTANTS.of("labeller", file="model.onnx")
def normaliser_counts_padding(surgery: Surgery) -> None:
    node = surgery.nodes("Clip")[0]
    node.op_type = "Mul"
    node.input[1] = surgery.constant(np.int64(2))


@MUTANTS.of("vit", file="model.onnx")
def class_token_last(surgery: Surgery) -> None:
    """The patches move up by one place, and the token takes that of the last."""
    places = surgery.nodes("Gather")[0]
    surgery.change_weight(places.input[1], lambda w: np.append(w[1:], w[-1:]))
    surgery.change_weight(surgery.nodes("Where")[0].input[0], lambda w: np.roll(w, -1, axis=0))


@MUTANTS.of("bert", "labeller", "vit", file="model.onnx")
def thirteen_items_wrong(surgery: Surgery) -> None:
    surgery.spoil_output("logits", 13)


@MUTANTS.of("bert", "labeller", file="model.onnx")
def embedding_of_five_tokens_wrong(surgery: Surgery) -> None:
    surgery.spoil_output("embedding", 5, of="input_ids", axis=1)


@pytest.mark.parametrize(("family", "name"), MUTANTS.cases)
def test_a_faulty_graph_is_refused_and_leaves_nothing(
    family: str, name: str, spoil: Spoil, tmp_path: Path
) -> None:
    refuse(spoil(family, *MUTANTS[family, name]), tmp_path)
