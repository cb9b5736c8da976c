"""Logits of other positions, and other tokens than the logits have, get no certificate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
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


# Numbers that tokens are chosen from: the logits are right


@decoder
def top_of_the_smallest(surgery: Surgery) -> None:
    surgery.set_attribute(surgery.nodes("TopK")[0], "largest", 0)


@decoder
def top_ids_off_by_one(surgery: Surgery) -> None:
    one = np.array([1], np.int64)
    surgery.change_output(
        "top_ids", lambda old: surgery.compute_before(surgery.last, "Add", old, one)
    )


@decoder
def log_softmax_left_out(surgery: Surgery) -> None:
    surgery.bypass(surgery.nodes("LogSoftmax")[0])


@decoder
def logprobs_at_temperature_2(surgery: Surgery) -> None:
    node = surgery.nodes("LogSoftmax")[0]
    node.input[0] = surgery.compute_before(node, "Mul", node.input[0], np.array([0.5], np.float32))


@decoder
def top_logits_at_temperature_2(surgery: Surgery) -> None:
    half = np.array([0.5], np.float32)
    surgery.change_output(
        "top_logits", lambda old: surgery.compute_before(surgery.last, "Mul", old, half)
    )


def _turned(surgery: Surgery, value: str) -> str:
    """Turn the columns round, the last first."""
    slice_of = [np.array([i], np.int64) for i in (-1, -1000, 1, -1)]
    return surgery.compute_before(surgery.last, "Slice", value, *slice_of)


@decoder
def top_right_for_one_only(surgery: Surgery) -> None:
    for name in ("top_ids", "top_logits", "top_logprobs"):
        surgery.change_output(name, lambda old: _turned(surgery, old))


@decoder
def top_logits_not_those_of_top_ids(surgery: Surgery) -> None:
    surgery.change_output("top_logits", lambda old: _turned(surgery, old))


@decoder
def top_wrong_for_one_only(surgery: Surgery) -> None:
    """The second is given where one is asked for."""
    node = surgery.nodes("TopK")[0]
    node.input[1] = surgery.compute_before(node, "Max", "num_top", np.array([2], np.int64))
    wanted = surgery.compute("Neg", "num_top")
    to_the_end = [np.array([i], np.int64) for i in (1000, 1)]

    def last_of(old: str) -> str:
        return surgery.compute_before(surgery.last, "Slice", old, wanted, *to_the_end)

    for name in ("top_ids", "top_logits", "top_logprobs"):
        surgery.change_output(name, last_of)


@decoder
def top_of_the_second_row_wrong(surgery: Surgery) -> None:
    def wrong(old: str) -> str:
        second = surgery.is_row(surgery.last, "Equal", old, 2, 2)
        number = surgery.compute_before(surgery.last, "Cast", second, to=onnx.TensorProto.INT64)
        return surgery.compute_before(surgery.last, "Sub", old, number)

    surgery.change_output("top_ids", wrong)


@decoder
def logprobs_of_the_best_eight_only(surgery: Surgery) -> None:
    def wrong(old: str) -> str:
        turned = surgery.compute_before(surgery.last, "Transpose", old, perm=[1, 0])
        late = surgery.is_row(surgery.last, "Greater", turned, 8, 2)
        spoilt = surgery.compute_before(surgery.last, "Sub", turned, late)
        return surgery.compute_before(surgery.last, "Transpose", spoilt, perm=[1, 0])

    surgery.change_output("top_logprobs", wrong)


# Logits of a whole chunk, and chunks behind the first


@decoder
def logit_idx_collapsed(surgery: Surgery) -> None:
    """Behind every position of a chunk come the logits of the last."""
    is_chunk, node = surgery.is_chunk(), surgery.rows_of_logits()
    last = surgery.compute_before(node, "ReduceMax", "logit_idx")
    left = surgery.compute_before(node, "Sub", last, "logit_idx")
    node.input[1] = surgery.compute_before(
        node, "Add", "logit_idx", surgery.compute_before(node, "Mul", left, is_chunk)
    )


@decoder
def logits_of_the_last_position_only(surgery: Surgery) -> None:
    """The others of a chunk are a little off."""
    is_chunk, node = surgery.is_chunk(), surgery.rows_of_logits()
    last = surgery.compute_before(node, "ReduceMax", "logit_idx")
    before = surgery.compute_before(node, "Sub", last, "logit_idx")
    count = surgery.compute_before(node, "Mul", before, is_chunk)
    column = surgery.compute_before(node, "Reshape", count, np.array([-1, 1], np.int64))
    number = surgery.compute_before(node, "Cast", column, to=onnx.TensorProto.FLOAT)
    trace = surgery.compute_before(node, "Mul", number, np.array([1e-3], np.float32))
    gathered = node.output[0]
    (head,) = surgery.nodes("Gemm")
    head.input[0] = surgery.compute_before(head, "Add", gathered, trace)


@decoder
def positions_of_later_chunks_off_by_one(surgery: Surgery) -> None:
    is_chunk = surgery.is_chunk()
    node = next(n for n in surgery.nodes("Gather") if n.input[1] == "position_ids")
    start = surgery.compute_before(node, "ReduceMin", "position_ids")
    is_late = surgery.compute_before(node, "Sign", start)
    shift = surgery.compute_before(node, "Mul", is_late, is_chunk)
    node.input[1] = surgery.compute_before(node, "Sub", "position_ids", shift)


@decoder
def keys_and_values_of_the_second_row_not_written(surgery: Surgery) -> None:
    for node in surgery.nodes("CachedAttention"):
        second = surgery.is_row(node, "Equal", node.input[0], 2, 3)
        width = 3 * 2 * 8  # query, key, value of two heads of eight
        columns = np.zeros((1, 1, width), np.float32)
        columns[..., width // 3 :] = 1
        lost = surgery.compute_before(node, "Mul", second, columns)
        kept = surgery.compute_before(node, "Sub", np.ones(1, np.float32), lost)
        node.input[0] = surgery.compute_before(node, "Mul", node.input[0], kept)


@MUTANTS.of("gpt", file="decoder.onnx")
def what_an_earlier_sequence_left_is_seen(surgery: Surgery) -> None:
    """Behind its end a row that was never used holds zeros, in which nothing is seen."""
    limit, node = 12, surgery.nodes("CachedAttention")[0]
    end = surgery.compute_before(node, "Add", "seqlens_k", np.ones(1, np.int32))
    within = surgery.compute_before(node, "Less", end, np.array([limit], np.int32))
    place = surgery.compute_before(node, "Min", end, np.array([limit - 1], np.int32))
    number = surgery.compute_before(node, "Cast", place, to=onnx.TensorProto.INT64)
    index = surgery.compute_before(node, "Reshape", number, np.array([-1, 1]))
    tokens = surgery.compute_before(node, "Transpose", node.input[2], perm=[0, 2, 1, 3])
    values = surgery.compute_before(node, "GatherND", tokens, index, batch_dims=1)
    row = surgery.compute_before(node, "Reshape", values, np.array([0, 1, -1]))  # [B, 1, width]
    flag = surgery.compute_before(node, "Cast", within, to=onnx.TensorProto.FLOAT)
    kept = surgery.compute_before(node, "Reshape", flag, np.array([-1, 1, 1]))
    left = surgery.compute_before(node, "Mul", row, kept)
    attended = node.output[0]
    reader = next(one for one in surgery.model.graph.node if attended in one.input)
    surgery.replace_uses(attended, surgery.compute_before(reader, "Add", attended, left))


# Draws, and requests of some rows


@decoder
def dropout_left_on(surgery: Surgery) -> None:
    (head,) = surgery.nodes("Gemm")
    read = head.input[0]
    noise = surgery.compute_before(head, "RandomUniformLike", read, low=-1e-6, high=1e-6)
    head.input[0] = surgery.compute_before(head, "Add", read, noise)


@decoder
def top_in_any_order(surgery: Surgery) -> None:
    surgery.set_attribute(surgery.nodes("TopK")[0], "sorted", 0)


@pytest.mark.parametrize(("family", "name"), MUTANTS.cases)
def test_a_faulty_graph_is_refused_and_leaves_nothing(
    family: str, name: str, spoil: Spoil, tmp_path: Path
) -> None:
    refuse(spoil(family, *MUTANTS[family, name]), tmp_path)
