"""Rows that are kept or told apart wrongly get no certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
cross_decoder = MUTANTS.of("encoder-decoder", file="decoder.onnx")
encoder = MUTANTS.of("encoder-decoder", file="encoder.onnx")


# The cache


@decoder
def seqlens_off_by_one(surgery: Surgery) -> None:
    shorter = surgery.compute("Sub", "seqlens_k", np.int32(1).reshape(1))
    tokens = surgery.compute("Shape", "input_ids", start=1, end=2)
    least = surgery.compute_before(
        surgery.nodes("CachedAttention")[0], "Sub", tokens, np.int64(1).reshape(1)
    )
    node = surgery.nodes("CachedAttention")[0]
    cast = surgery.compute_before(node, "CastLike", least, "seqlens_k")
    capped = surgery.compute_before(node, "Max", shorter, cast)
    surgery.replace_uses("seqlens_k", capped, of="CachedAttention")


@decoder
def lengths_of_rows_swapped(surgery: Surgery) -> None:
    surgery.replace_uses("seqlens_k", surgery.reversed_rows("seqlens_k"), of="CachedAttention")


@cross_decoder
def source_lengths_of_rows_swapped(surgery: Surgery) -> None:
    surgery.replace_uses("source_lengths", surgery.reversed_rows("source_lengths"))


@cross_decoder
def cross_rows_swapped(surgery: Surgery) -> None:
    name = "cross_key_values.1.value"
    surgery.replace_uses(name, surgery.reversed_rows(name))


@decoder
def key_and_value_rows_swapped(surgery: Surgery) -> None:
    node = surgery.nodes("CachedAttention")[1]
    node.input[1], node.input[2] = node.input[2], node.input[1]


@decoder
def rows_of_layers_swapped(surgery: Surgery) -> None:
    first, second = surgery.nodes("CachedAttention")
    for i in (1, 2):
        first.input[i], second.input[i] = second.input[i], first.input[i]


@encoder
def source_written_one_position_late(surgery: Surgery) -> None:
    node = surgery.nodes("TensorScatter")[0]
    taken = [np.array([value], np.int64) for value in (0, 8, 2)]
    node.input[1] = surgery.compute_before(node, "Slice", node.input[1], *taken)
    node.input.append(surgery.constant(np.ones(1, np.int64)))


@encoder
def source_of_one_layer_not_written(surgery: Surgery) -> None:
    node = surgery.nodes("TensorScatter")[3]
    node.input[1] = surgery.compute_before(
        node, "Slice", node.input[0], *[np.array([value], np.int64) for value in (0, 1, 2)]
    )


# Sources in groups, and beams that share one


def _scale_updates(surgery: Surgery, op_type: str, limit: int) -> None:
    """Keep the keys and values of the sources whose number is so; the others become zeros."""
    for node in surgery.nodes("TensorScatter"):
        kept = surgery.is_row(node, op_type, node.input[1], limit, 4)
        node.input[1] = surgery.compute_before(node, "Mul", node.input[1], kept)


@encoder
def second_and_later_sources_zeroed(surgery: Surgery) -> None:
    _scale_updates(surgery, "Less", 2)


@encoder
def sources_beyond_the_fourth_zeroed(surgery: Surgery) -> None:
    _scale_updates(surgery, "Less", 5)


@encoder
def eighth_source_zeroed(surgery: Surgery) -> None:
    _scale_updates(surgery, "Less", 8)


@encoder
def sources_see_each_other(surgery: Surgery) -> None:
    """Too little for any tolerance, and nothing for one source."""
    node = surgery.nodes("TensorScatter")[2]
    first = np.array([0], np.int64)
    total = surgery.compute_before(node, "ReduceMax", node.input[1], first)
    others = surgery.compute_before(node, "Sub", total, node.input[1])
    trace = surgery.compute_before(node, "Mul", others, np.array([1e-6], np.float32))
    node.input[1] = surgery.compute_before(node, "Add", node.input[1], trace)


@encoder
def second_source_at_other_positions(surgery: Surgery) -> None:
    node = next(n for n in surgery.nodes("Gather") if n.input[1] == "input_ids")
    is_later = surgery.is_row(node, "Greater", "input_ids", 1, 2)
    shift = surgery.compute_before(node, "Cast", is_later, to=onnx.TensorProto.INT64)
    node.input[1] = surgery.compute_before(
        node,
        "Mul",
        node.input[1],
        surgery.compute_before(node, "Sub", np.array([1], np.int64), shift),
    )


def _replace_row_queries(surgery: Surgery, make: Callable[[onnx.NodeProto, str, str], str]) -> None:
    node = surgery.nodes("CrossAttention")[0]
    group = surgery.compute_before(node, "Shape", "beam_rows", start=1, end=2)
    surgery.replace_uses("row_queries", make(node, "row_queries", group), of="CrossAttention")


@cross_decoder
def all_beams_given_the_first_ones_cross_attention(surgery: Surgery) -> None:
    def first_of_group(node: onnx.NodeProto, place: str, group: str) -> str:
        source = surgery.compute_before(node, "Div", place, group)
        return surgery.compute_before(node, "Mul", source, group)

    _replace_row_queries(surgery, first_of_group)


@cross_decoder
def row_queries_ignored(surgery: Surgery) -> None:
    def numbers(node: onnx.NodeProto, place: str, group: str) -> str:
        rows = surgery.row_numbers(node, place, 2)
        from_0 = surgery.compute_before(node, "Sub", rows, np.ones(1, np.float32))
        row = surgery.compute_before(node, "Cast", from_0, to=onnx.TensorProto.INT64)
        slice_of = [np.array([i], np.int64) for i in (0, 1, 1)]
        first = surgery.compute_before(node, "Slice", place, *slice_of)
        within = surgery.compute_before(node, "Sub", place, first)
        return surgery.compute_before(node, "Add", row, within)

    _replace_row_queries(surgery, numbers)


@cross_decoder
def beams_beyond_the_eighth_given_its_cross_attention(surgery: Surgery) -> None:
    def at_most_7(node: onnx.NodeProto, place: str, group: str) -> str:
        number = surgery.compute_before(node, "Mod", place, group)
        behind = surgery.compute_before(node, "Sub", number, np.array([7], np.int64))
        over = surgery.compute_before(node, "Max", behind, np.array([0], np.int64))
        return surgery.compute_before(node, "Sub", place, over)

    _replace_row_queries(surgery, at_most_7)


@cross_decoder
def source_length_of_the_first_for_all(surgery: Surgery) -> None:
    slice_of = [np.array([i], np.int64) for i in (0, 1)]
    first = surgery.compute("Slice", "source_lengths", *slice_of)
    node = surgery.nodes("CrossAttention")[0]
    size = surgery.compute_before(node, "Shape", "source_lengths")
    surgery.replace_uses(
        "source_lengths", surgery.compute_before(node, "Expand", first, size), of="CrossAttention"
    )


@cross_decoder
def scale_of_sixteen_beams_missing(surgery: Surgery) -> None:
    """The branch that only a group of this width takes."""
    _spoil_branch(surgery, 16)


@cross_decoder
def scale_of_two_beams_missing(surgery: Surgery) -> None:
    _spoil_branch(surgery, 2)


def _spoil_branch(surgery: Surgery, width: int) -> None:
    def visit(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
        for node in nodes:
            yield node
            for attribute in node.attribute:
                yield from visit(attribute.g.node)

    (function,) = (f for f in surgery.model.functions if f.name == "CrossAttention")
    wanted = f"num_heads_x{width}"
    node = next(
        node
        for node in visit(function.node)
        if any(a.ref_attr_name == wanted for a in node.attribute)
    )
    surgery.set_attribute(node, "scale", 0.5)


@cross_decoder
def alignment_of_the_second_row_wrong(surgery: Surgery) -> None:
    """Right where one position is asked for."""

    def wrong(old: str) -> str:
        second = surgery.is_row(surgery.last, "Equal", old, 2, 2)
        less = surgery.compute_before(surgery.last, "Mul", second, np.array([0.1], np.float32))
        kept = surgery.compute_before(surgery.last, "Sub", np.ones(1, np.float32), less)
        return surgery.compute_before(surgery.last, "Mul", old, kept)

    surgery.change_output("alignment", wrong)


# As many rows as a step of the engine has


@decoder
def logits_beyond_the_sixteenth_row_wrong(surgery: Surgery) -> None:
    """Not of a chunk."""
    is_chunk, node = surgery.is_chunk(), surgery.rows_of_logits()
    beyond = surgery.compute_before(
        node, "Sub", np.ones(1, np.float32), surgery.is_row(node, "Less", "logit_idx", 17, 1)
    )
    is_late = surgery.compute_before(node, "Cast", beyond, to=onnx.TensorProto.INT64)
    is_single = surgery.compute_before(node, "Sub", np.ones(1, np.int64), is_chunk)
    is_wrong = surgery.compute_before(node, "Mul", is_late, is_single)
    node.input[1] = surgery.compute_before(node, "Sub", "logit_idx", is_wrong)


@cross_decoder
def lengths_of_sources_beyond_the_sixteenth_forgotten(surgery: Surgery) -> None:
    node = surgery.nodes("CrossAttention")[0]
    first = surgery.is_row(node, "Less", "source_lengths", 17, 1)
    kept = surgery.compute_before(node, "Cast", first, to=onnx.TensorProto.INT64)
    known = surgery.compute_before(node, "Mul", "source_lengths", kept)
    least = surgery.compute_before(node, "Max", known, np.ones(1, np.int64))
    surgery.replace_uses("source_lengths", least, of="CrossAttention")


@encoder
def sources_beyond_the_eighth_zeroed(surgery: Surgery) -> None:
    _scale_updates(surgery, "Less", 9)


@encoder
def sources_of_groups_of_seven_zeroed(surgery: Surgery) -> None:
    for node in surgery.nodes("TensorScatter"):
        size = surgery.compute_before(node, "Shape", "input_ids", start=0, end=1)
        other = surgery.compute_before(node, "Sub", size, np.array([7], np.int64))
        distance = surgery.compute_before(node, "Abs", other)
        kept = surgery.compute_before(node, "Sign", distance)
        factor = surgery.compute_before(node, "Cast", kept, to=onnx.TensorProto.FLOAT)
        node.input[1] = surgery.compute_before(node, "Mul", node.input[1], factor)


# One number of rows only


def _spoil_logits_of(surgery: Surgery, num_rows: int) -> None:
    """Change what the head reads, in whatever nodes."""
    read = surgery.rows_of_logits().output[0]
    head = next(node for node in surgery.model.graph.node if read in node.input)
    flag = surgery.is_count(head, "input_ids", num_rows)
    surgery.replace_uses(read, surgery.more(head, read, flag))


@decoder
def logits_of_thirteen_rows_wrong(surgery: Surgery) -> None:
    _spoil_logits_of(surgery, 13)


@decoder
def logits_of_one_row_more_than_a_tile_wrong(surgery: Surgery) -> None:
    _spoil_logits_of(surgery, 17)


@decoder
def logits_of_all_rows_but_one_wrong(surgery: Surgery) -> None:
    _spoil_logits_of(surgery, 31)


@cross_decoder
def thirteen_rows_aligned_wrongly(surgery: Surgery) -> None:
    surgery.spoil_output("alignment", 13)


@encoder
def thirteen_sources_wrong(surgery: Surgery) -> None:
    for node in surgery.nodes("TensorScatter"):
        flag = surgery.is_count(node, "input_ids", 13)
        node.input[1] = surgery.more(node, node.input[1], flag)


@encoder
def two_of_the_longest_sources_wrong(surgery: Surgery) -> None:
    for node in surgery.nodes("TensorScatter"):
        is_pair = surgery.is_count(node, "input_ids", 2)
        is_longest = surgery.is_count(node, "input_ids", 9, axis=1)
        flag = surgery.compute_before(node, "Mul", is_pair, is_longest)
        node.input[1] = surgery.more(node, node.input[1], flag)


@decoder
def positions_of_chunks_of_two_tokens_lost(surgery: Surgery) -> None:
    node = next(n for n in surgery.nodes("Gather") if n.input[1] == "position_ids")
    flag = surgery.is_count(node, "input_ids", 2, axis=1)
    is_pair = surgery.compute_before(node, "Cast", flag, to=onnx.TensorProto.INT64)
    kept = surgery.compute_before(node, "Sub", np.ones(1, np.int64), is_pair)
    node.input[1] = surgery.compute_before(node, "Mul", node.input[1], kept)


@decoder
def logprobs_of_sixteen_wrong(surgery: Surgery) -> None:
    surgery.spoil_output("top_logprobs", 16, axis=1)


# Requests of some rows


@cross_decoder
def rows_aligned_to_the_source_of_the_same_number(surgery: Surgery) -> None:
    """Right where every row has a source of its own."""
    (node,) = surgery.nodes("CrossAlignment")
    node.input[4] = "alignment_idx"


@cross_decoder
def a_source_for_nobody_misleads_the_others(surgery: Surgery) -> None:
    """As many sources as rows are right."""
    node = surgery.nodes("CrossAttention")[0]
    sources = surgery.compute_before(node, "Shape", "source_lengths", start=0, end=1)
    rows = surgery.compute_before(node, "Shape", "input_ids", start=0, end=1)
    is_more = surgery.compute_before(node, "Greater", sources, rows)
    flag = surgery.compute_before(node, "Cast", is_more, to=onnx.TensorProto.INT64)
    kept = surgery.compute_before(node, "Sub", np.ones(1, np.int64), flag)
    first = surgery.compute_before(node, "Mul", "row_queries", kept)
    surgery.replace_uses("row_queries", first, of="CrossAttention")


@cross_decoder
def first_rows_aligned_whichever_are_asked(surgery: Surgery) -> None:
    (node,) = surgery.nodes("CrossAlignment")
    numbers = surgery.row_numbers(node, "alignment_idx", 1)
    from_0 = surgery.compute_before(node, "Sub", numbers, np.ones(1, np.float32))
    node.input[3] = surgery.compute_before(node, "Cast", from_0, to=onnx.TensorProto.INT64)


@pytest.mark.parametrize(("family", "name"), MUTANTS.cases)
def test_a_faulty_graph_is_refused_and_leaves_nothing(
    family: str, name: str, spoil: Spoil, tmp_path: Path
) -> None:
    refuse(spoil(family, *MUTANTS[family, name]), tmp_path)
