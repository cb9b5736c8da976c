"""A fault of the exporter, whatever it is, gets no certificate and leaves no package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn
from torch.nn import functional

from engine.errors import CertificateError
from engine.package.manifest import CacheDtype, Weights
from exporter import export
from exporter.checkpoint import load_checkpoint, save_checkpoint
from exporter.graphs import package_graphs, rewrite
from exporter.graphs import torch_export as graphs_module
from exporter.graphs.torch_export import Graphs
from exporter.models import GPT
from exporter.models.attention import MultiHeadAttention
from exporter.models.layers import Decoder
from exporter.prover.loss import LossLimits

MakeCheckpoint = Callable[..., Path]
TinyGraphs = Callable[[str], tuple[Path, Graphs]]
Mutation = Callable[["Surgery"], None]

# What tells where a fault was found, or that a graph does not run at all.
PLACE = r"source of \d|prompt of \d|text of \d|image \d|cannot be run"
FAMILIES = ("encoder-decoder", "gpt", "bert", "labeller", "vit")
MUTANTS: dict[tuple[str, str], tuple[str, Mutation]] = {}  # (family, name): file, mutation


class Surgery:
    """Changes an exported graph by hand."""

    def __init__(self, graph: ir.Model) -> None:
        self.model = ir.to_proto(graph)
        self._fresh = (f"mutant_{i}" for i in range(1000))

    def nodes(self, op_type: str) -> list[onnx.NodeProto]:
        found = [node for node in self.model.graph.node if node.op_type == op_type]
        assert found, f"the graph has no {op_type}"
        return found

    def producer(self, value: str) -> onnx.NodeProto:
        return next(node for node in self.model.graph.node if value in node.output)

    def set_attribute(self, node: onnx.NodeProto, name: str, value: object) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    def compute(self, op_type: str, *inputs: str | np.ndarray, **attributes: object) -> str:
        """Add a node that needs only inputs and weights of the graph; return its output."""
        output = next(self._fresh)
        names = [self.constant(x) if isinstance(x, np.ndarray) else x for x in inputs]
        self.model.graph.node.insert(0, helper.make_node(op_type, names, [output], **attributes))
        return output

    def compute_before(
        self, node: onnx.NodeProto, op_type: str, *inputs: str | np.ndarray, **attributes: object
    ) -> str:
        """Add a node in front of another; return its output."""
        output = next(self._fresh)
        names = [self.constant(x) if isinstance(x, np.ndarray) else x for x in inputs]
        index = list(self.model.graph.node).index(node)
        added = helper.make_node(op_type, names, [output], **attributes)
        self.model.graph.node.insert(index, added)
        return output

    def change_output(self, name: str, change: Callable[[str], str]) -> None:
        """Give another value for an output; `change` adds the nodes that make it of the old one.

        Other nodes go on with the old one.
        """
        old, producer = next(self._fresh), self.producer(name)
        producer.output[list(producer.output).index(name)] = old
        self.replace_uses(name, old)
        self.model.graph.node.append(helper.make_node("Identity", ["unknown"], [name]))
        last = self.model.graph.node[-1]
        changed = change(old)
        last.input[0] = changed

    @property
    def last(self) -> onnx.NodeProto:
        return self.model.graph.node[-1]

    def row_numbers(self, node: onnx.NodeProto, value: str, rank: int) -> str:
        """Return 1, 2, ... for the rows of a value, float32 [B, 1, ...], made before a node."""
        size = self.compute_before(node, "Shape", value, start=0, end=1)
        one = numpy_helper.from_array(np.ones(1, np.float32))
        ones = self.compute_before(node, "ConstantOfShape", size, value=one)
        numbers = self.compute_before(node, "CumSum", ones, np.array(0, np.int64))
        shape = np.array([-1] + [1] * (rank - 1), np.int64)
        return self.compute_before(node, "Reshape", numbers, shape)

    def is_row(self, node: onnx.NodeProto, op_type: str, value: str, limit: int, rank: int) -> str:
        """Return 1.0 for the rows whose number is so, else 0.0: float32 [B, 1, ...]."""
        numbers = self.row_numbers(node, value, rank)
        flags = self.compute_before(node, op_type, numbers, np.array([limit], np.float32))
        return self.compute_before(node, "Cast", flags, to=onnx.TensorProto.FLOAT)

    def constant(self, array: np.ndarray) -> str:
        name = next(self._fresh)
        self.model.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def replace_uses(self, old: str, new: str, *, of: str | None = None) -> None:
        """Give all nodes (of a type) another value in place of one."""
        for node in self.model.graph.node:
            if new in node.output or (of and node.op_type != of):
                continue
            for i, name in enumerate(node.input):
                if name == old:
                    node.input[i] = new

    def bypass(self, node: onnx.NodeProto, input_index: int = 0) -> None:
        """Take a node's input for its output."""
        self.replace_uses(node.output[0], node.input[input_index])

    def change_weight(self, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
        for tensor in self.model.graph.initializer:
            if tensor.name == name:
                array = change(numpy_helper.to_array(tensor).copy())
                tensor.CopyFrom(numpy_helper.from_array(array, name))
                return
        raise AssertionError(f"the graph has no weight {name}")

    def graph(self) -> ir.Model:
        return ir.from_proto(self.model)


def mutant(*families: str, file: str) -> Callable[[Mutation], Mutation]:
    def add(mutation: Mutation) -> Mutation:
        for family in families:
            MUTANTS[family, mutation.__name__] = file, mutation
        return mutation

    return add


DECODERS = ("encoder-decoder", "gpt")
decoder = mutant(*DECODERS, file="decoder.onnx")
cross_decoder = mutant("encoder-decoder", file="decoder.onnx")
encoder = mutant("encoder-decoder", file="encoder.onnx")


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


def _reversed_rows(surgery: Surgery, name: str) -> str:
    slice_of = [np.array([value], np.int64) for value in (-1, -100, 0, -1)]
    return surgery.compute("Slice", name, *slice_of)


@decoder
def lengths_of_rows_swapped(surgery: Surgery) -> None:
    surgery.replace_uses("seqlens_k", _reversed_rows(surgery, "seqlens_k"), of="CachedAttention")


@cross_decoder
def source_lengths_of_rows_swapped(surgery: Surgery) -> None:
    surgery.replace_uses("source_lengths", _reversed_rows(surgery, "source_lengths"))


@cross_decoder
def cross_rows_swapped(surgery: Surgery) -> None:
    name = "cross_key_values.1.value"
    surgery.replace_uses(name, _reversed_rows(surgery, name))


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


@mutant(*DECODERS, file="decoder.onnx")
def last_position_wrong(surgery: Surgery) -> None:
    def spoil(table: np.ndarray) -> np.ndarray:
        table[-1] = table[-2]
        return table

    surgery.change_weight(_position_table(surgery), spoil)


@mutant(*DECODERS, file="decoder.onnx")
def position_table_too_short(surgery: Surgery) -> None:
    """onnxruntime loads this one, and runs it until the last position is reached."""
    surgery.change_weight(_position_table(surgery), lambda table: table[:-1])


@mutant("encoder-decoder", file="decoder.onnx")
def embedding_scale_missing(surgery: Surgery) -> None:
    surgery.bypass(surgery.nodes("Mul")[0])


@mutant(*DECODERS, file="decoder.onnx")
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


@mutant("encoder-decoder", file="decoder.onnx")
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


# What tokens are chosen from: the logits are right


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


def _is_chunk(surgery: Surgery) -> str:
    """Return 1 for several tokens a row, 0 for one: int64 [1]."""
    tokens = surgery.compute_before(
        surgery.model.graph.node[0], "Shape", "input_ids", start=1, end=2
    )
    node = surgery.model.graph.node[1]
    return surgery.compute_before(
        node, "Sign", surgery.compute_before(node, "Sub", tokens, np.array([1], np.int64))
    )


def _rows_of_logits(surgery: Surgery) -> onnx.NodeProto:
    return next(node for node in surgery.nodes("Gather") if node.input[1] == "logit_idx")


@decoder
def logit_idx_collapsed(surgery: Surgery) -> None:
    """Behind every position of a chunk come the logits of the last."""
    is_chunk, node = _is_chunk(surgery), _rows_of_logits(surgery)
    last = surgery.compute_before(node, "ReduceMax", "logit_idx")
    left = surgery.compute_before(node, "Sub", last, "logit_idx")
    node.input[1] = surgery.compute_before(
        node, "Add", "logit_idx", surgery.compute_before(node, "Mul", left, is_chunk)
    )


@decoder
def logits_of_the_last_position_only(surgery: Surgery) -> None:
    """The others of a chunk are a little off."""
    is_chunk, node = _is_chunk(surgery), _rows_of_logits(surgery)
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
    is_chunk = _is_chunk(surgery)
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


@mutant("gpt", file="decoder.onnx")
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
    is_chunk, node = _is_chunk(surgery), _rows_of_logits(surgery)
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


def _is_count(surgery: Surgery, node: onnx.NodeProto, value: str, count: int, axis: int = 0) -> str:
    """Return 1.0 where a value has so many rows (or columns, with `axis` 1), else 0.0."""
    size = surgery.compute_before(node, "Shape", value, start=axis, end=axis + 1)
    is_so = surgery.compute_before(node, "Equal", size, np.array([count], np.int64))
    return surgery.compute_before(node, "Cast", is_so, to=onnx.TensorProto.FLOAT)


def _more(surgery: Surgery, node: onnx.NodeProto, value: str, flag: str) -> str:
    added = surgery.compute_before(node, "Mul", flag, np.array([5], np.float32))
    return surgery.compute_before(node, "Add", value, added)


def _spoil_output(
    surgery: Surgery, output: str, count: int, *, of: str | None = None, axis: int = 0
) -> None:
    """Change an output where it, or an input, has so many rows or columns."""

    def wrong(old: str) -> str:
        flag = _is_count(surgery, surgery.last, of or old, count, axis)
        return _more(surgery, surgery.last, old, flag)

    surgery.change_output(output, wrong)


def _spoil_logits_of(surgery: Surgery, num_rows: int) -> None:
    """Change what the head reads, in whatever nodes."""
    read = _rows_of_logits(surgery).output[0]
    head = next(node for node in surgery.model.graph.node if read in node.input)
    flag = _is_count(surgery, head, "input_ids", num_rows)
    surgery.replace_uses(read, _more(surgery, head, read, flag))


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
    _spoil_output(surgery, "alignment", 13)


@encoder
def thirteen_sources_wrong(surgery: Surgery) -> None:
    for node in surgery.nodes("TensorScatter"):
        flag = _is_count(surgery, node, "input_ids", 13)
        node.input[1] = _more(surgery, node, node.input[1], flag)


@encoder
def two_of_the_longest_sources_wrong(surgery: Surgery) -> None:
    for node in surgery.nodes("TensorScatter"):
        is_pair = _is_count(surgery, node, "input_ids", 2)
        is_longest = _is_count(surgery, node, "input_ids", 9, axis=1)
        flag = surgery.compute_before(node, "Mul", is_pair, is_longest)
        node.input[1] = _more(surgery, node, node.input[1], flag)


@mutant("bert", "labeller", "vit", file="model.onnx")
def thirteen_items_wrong(surgery: Surgery) -> None:
    _spoil_output(surgery, "logits", 13)


@mutant("bert", "labeller", file="model.onnx")
def embedding_of_five_tokens_wrong(surgery: Surgery) -> None:
    _spoil_output(surgery, "embedding", 5, of="input_ids", axis=1)


@decoder
def positions_of_chunks_of_two_tokens_lost(surgery: Surgery) -> None:
    node = next(n for n in surgery.nodes("Gather") if n.input[1] == "position_ids")
    flag = _is_count(surgery, node, "input_ids", 2, axis=1)
    is_pair = surgery.compute_before(node, "Cast", flag, to=onnx.TensorProto.INT64)
    kept = surgery.compute_before(node, "Sub", np.ones(1, np.int64), is_pair)
    node.input[1] = surgery.compute_before(node, "Mul", node.input[1], kept)


@decoder
def logprobs_of_sixteen_wrong(surgery: Surgery) -> None:
    _spoil_output(surgery, "top_logprobs", 16, axis=1)


# What is drawn, and what is asked for of some rows


@decoder
def dropout_left_on(surgery: Surgery) -> None:
    (head,) = surgery.nodes("Gemm")
    read = head.input[0]
    noise = surgery.compute_before(head, "RandomUniformLike", read, low=-1e-6, high=1e-6)
    head.input[0] = surgery.compute_before(head, "Add", read, noise)


@decoder
def top_in_any_order(surgery: Surgery) -> None:
    surgery.set_attribute(surgery.nodes("TopK")[0], "sorted", 0)


@cross_decoder
def first_rows_aligned_whichever_are_asked(surgery: Surgery) -> None:
    (node,) = surgery.nodes("CrossAlignment")
    numbers = surgery.row_numbers(node, "alignment_idx", 1)
    from_0 = surgery.compute_before(node, "Sub", numbers, np.ones(1, np.float32))
    node.input[3] = surgery.compute_before(node, "Cast", from_0, to=onnx.TensorProto.INT64)


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


# One-pass models


def _rows_zeroed(surgery: Surgery, output: str, first: int, rank: int) -> None:
    def wrong(old: str) -> str:
        kept = surgery.is_row(surgery.last, "Less", old, first, rank)
        return surgery.compute_before(surgery.last, "Mul", old, kept)

    surgery.change_output(output, wrong)


@mutant("bert", "vit", file="model.onnx")
def rows_beyond_the_eighth_zeroed(surgery: Surgery) -> None:
    _rows_zeroed(surgery, "logits", 9, 2)


@mutant("labeller", file="model.onnx")
def labels_beyond_the_eighth_row_zeroed(surgery: Surgery) -> None:
    _rows_zeroed(surgery, "logits", 9, 3)


@mutant("bert", "labeller", file="model.onnx")
def embedding_of_padded_rows_wrong(surgery: Surgery) -> None:
    def wrong(old: str) -> str:
        tokens = surgery.compute_before(surgery.last, "Shape", "input_ids", start=1, end=2)
        missing = surgery.compute_before(surgery.last, "Sub", tokens, "lengths")
        column = surgery.compute_before(surgery.last, "Reshape", missing, np.array([-1, 1]))
        count = surgery.compute_before(surgery.last, "Cast", column, to=onnx.TensorProto.FLOAT)
        trace = surgery.compute_before(surgery.last, "Mul", count, np.array([1e-3], np.float32))
        return surgery.compute_before(surgery.last, "Add", old, trace)

    surgery.change_output("embedding", wrong)


@mutant("bert", "vit", file="model.onnx")
def rows_beyond_the_fourth_zeroed(surgery: Surgery) -> None:
    _rows_zeroed(surgery, "logits", 5, 2)


@mutant("bert", "labeller", "vit", file="model.onnx")
def embeddings_see_each_other(surgery: Surgery) -> None:
    def wrong(old: str) -> str:
        first = np.array([0], np.int64)
        largest = surgery.compute_before(surgery.last, "ReduceMax", old, first)
        others = surgery.compute_before(surgery.last, "Sub", largest, old)
        trace = surgery.compute_before(surgery.last, "Mul", others, np.array([1e-6], np.float32))
        return surgery.compute_before(surgery.last, "Add", old, trace)

    surgery.change_output("embedding", wrong)


@mutant("bert", "labeller", file="model.onnx")
def padding_leaks(surgery: Surgery) -> None:
    everything = surgery.compute("Mul", "lengths", np.int64(0).reshape(1))
    node = surgery.nodes("Unsqueeze")[0]
    full = surgery.compute_before(node, "Add", everything, np.int64(9).reshape(1))
    surgery.replace_uses("lengths", full, of="Unsqueeze")


@mutant("bert", file="model.onnx")
def pooler_without_tanh(surgery: Surgery) -> None:
    surgery.nodes("Tanh")[0].op_type = "Identity"


@mutant("bert", file="model.onnx")
def token_types_forgotten(surgery: Surgery) -> None:
    normed = surgery.producer(surgery.nodes("LayerNormalization")[0].input[0])
    table = surgery.producer(normed.input[1]).input[0]
    surgery.change_weight(table, lambda w: np.repeat(w[:1], len(w), axis=0))


@mutant("bert", "vit", file="model.onnx")
def labels_permuted(surgery: Surgery) -> None:
    surgery.change_weight(surgery.nodes("Gemm")[-1].input[1], lambda w: np.roll(w, 1, axis=0))


@mutant("labeller", file="model.onnx")
def normaliser_counts_padding(surgery: Surgery) -> None:
    node = surgery.nodes("Clip")[0]
    node.op_type = "Mul"
    node.input[1] = surgery.constant(np.int64(2))


@mutant("vit", file="model.onnx")
def class_token_last(surgery: Surgery) -> None:
    """The patches move up by one place, and the token takes that of the last."""
    places = surgery.nodes("Gather")[0]
    surgery.change_weight(places.input[1], lambda w: np.append(w[1:], w[-1:]))
    surgery.change_weight(surgery.nodes("Where")[0].input[0], lambda w: np.roll(w, -1, axis=0))


def spoiled(graphs: Graphs, file: str, mutate: Mutation) -> Graphs:
    surgery = Surgery(graphs[file])
    mutate(surgery)
    return {**graphs, file: surgery.graph()}


Spoil = Callable[[str, str, Mutation], Path]


@pytest.fixture
def spoil(tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Let the graphs of a family be traced with a fault; give its checkpoint."""

    def make(family: str, file: str, mutate: Mutation) -> Path:
        def trace(model: nn.Module, **_: object) -> Graphs:
            return spoiled(tiny_graphs(family)[1], file, mutate)

        monkeypatch.setattr(package_graphs, "build_graphs", trace)
        checkpoint, _ = tiny_graphs(family)
        return checkpoint

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graphs_as_they_are_get_a_certificate(
    family: str, tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint, graphs = tiny_graphs(family)
    again = {name: Surgery(graph).graph() for name, graph in graphs.items()}
    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: again)

    export.export_package(checkpoint, tmp_path / "package")

    assert (tmp_path / "package" / "manifest.json").is_file()


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize(("family", "name"), MUTANTS)
def test_a_faulty_graph_is_refused_and_leaves_nothing(
    family: str, name: str, spoil: Spoil, tmp_path: Path
) -> None:
    checkpoint = spoil(family, *MUTANTS[family, name])

    with pytest.raises(CertificateError, match=PLACE):
        export.export_package(checkpoint, tmp_path / "package")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize(
    ("family", "file", "options"),
    [
        ("gpt", "decoder.onnx", {"vocab_size": 5000, "tie_output": False}),
        ("bert", "model.onnx", {"vocab_size": 5000}),
    ],
)
def test_a_large_vocabulary_that_was_cut_is_refused(
    family: str,
    file: str,
    options: dict[str, object],
    make_checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint(family, **options)
    graphs = package_graphs.build_graphs(load_checkpoint(checkpoint).model)
    mutated = spoiled(graphs, file, last_token_of_the_vocabulary_lost)
    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: mutated)

    with pytest.raises(CertificateError, match=PLACE):
        export.export_package(checkpoint, tmp_path / "package")


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("name", [name for _, name in MUTANTS if name.startswith("alignment")])
def test_a_wrong_alignment_is_named_with_case_and_difference(
    name: str, spoil: Spoil, tmp_path: Path
) -> None:
    checkpoint = spoil("encoder-decoder", *MUTANTS["encoder-decoder", name])
    message = r"^source of \d tokens, prompt of \d, .* step \d.* alignment.* differs by 0\.\d+"
    with pytest.raises(CertificateError, match=message):
        export.export_package(checkpoint, tmp_path / "package")


# Faults of the exporter's own steps


def values_before_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = rewrite._joined
    monkeypatch.setattr(rewrite, "_joined", lambda op, name, q, k, v: joined(op, name, q, v, k))


def output_columns_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(projection: nn.Linear, num_heads: int, width: int) -> None:
        missing = num_heads * width - projection.in_features
        projection.weight = nn.Parameter(functional.pad(projection.weight, (0, missing)))

    monkeypatch.setattr(graphs_module, "_widen_columns", wrong)


def scale_follows_the_widened_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    widen = graphs_module.widen_heads

    def wrong(decoder: Decoder) -> None:
        widen(decoder)
        for attention in decoder.modules():
            if isinstance(attention, MultiHeadAttention):
                attention.scale = attention.key_dim**-0.5

    monkeypatch.setattr(graphs_module, "widen_heads", wrong)


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize(
    "spoil", [values_before_keys, output_columns_not_widened, scale_follows_the_widened_heads]
)
def test_a_fault_of_the_exporter_is_refused_and_leaves_nothing(
    spoil: Callable[[pytest.MonkeyPatch], None],
    make_checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint("gpt", num_decoder_layers=1, key_dim=6, value_dim=5)
    spoil(monkeypatch)

    with pytest.raises(CertificateError):
        export.export_package(checkpoint, tmp_path / "package")

    assert list(tmp_path.iterdir()) == []


# A cache in 8 bits: differences are counted, and what the graph says of its own logits is compared


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


@pytest.mark.usefixtures("few_cases")
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


LOSSLESS_IN_ANY_FORMAT = [
    "top_of_the_smallest",
    "top_ids_off_by_one",
    "log_softmax_left_out",
    "top_wrong_for_one_only",
    "top_of_the_second_row_wrong",
]


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("name", LOSSLESS_IN_ANY_FORMAT)
def test_a_cache_in_8_bits_excuses_no_wrong_choice(name: str, spoil: Spoil, tmp_path: Path) -> None:
    checkpoint = spoil("gpt", *MUTANTS["gpt", name])
    any_loss = LossLimits(
        max_token_loss=1, max_logit_loss=100, max_perplexity_loss=100, max_vector_loss=1
    )
    wrong = "(top_log|top_ids|likeliest tokens are 1 to 31, outside the vocabulary)"

    with pytest.raises(CertificateError, match=f"prompt of .* {wrong}"):
        export.export_package(checkpoint, tmp_path / "package", kv_cache="int8", limits=any_loss)


# Weights in 8 bits: a row may depend on its neighbours, but not lose more than is allowed


def _embeddings_zeroed(surgery: Surgery) -> None:
    _rows_zeroed(surgery, "embedding", 1, 2)


def _later_rows_zeroed(surgery: Surgery) -> None:
    _rows_zeroed(surgery, "logits", 2, 2)


def _alignment_zeroed(surgery: Surgery) -> None:
    _rows_zeroed(surgery, "alignment", 1, 2)


def _alignment_of_the_first_token(surgery: Surgery) -> None:
    def wrong(old: str) -> str:
        turned = surgery.compute_before(surgery.last, "Transpose", old, perm=[1, 0])
        first = surgery.is_row(surgery.last, "Less", turned, 2, 2)
        nothing = surgery.compute_before(surgery.last, "Mul", turned, np.zeros(1, np.float32))
        shares = surgery.compute_before(surgery.last, "Add", nothing, first)
        return surgery.compute_before(surgery.last, "Transpose", shares, perm=[1, 0])

    surgery.change_output("alignment", wrong)


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize(
    ("family", "file", "mutate", "message"),
    [
        ("bert", "model.onnx", _embeddings_zeroed, "a share of its length, 1, allowed 0.2"),
        ("vit", "model.onnx", _embeddings_zeroed, "a share of its length, 1, allowed 0.2"),
        ("vit", "model.onnx", _later_rows_zeroed, "greedy tokens|logit difference"),
        ("encoder-decoder", "decoder.onnx", _alignment_zeroed, "add up to 0"),
        (
            "encoder-decoder",
            "decoder.onnx",
            _alignment_of_the_first_token,
            "share of the attention",
        ),
        ("encoder-decoder", "decoder.onnx", thirteen_rows_aligned_wrongly, "add up to"),
        ("encoder-decoder", "encoder.onnx", sources_of_groups_of_seven_zeroed, "difference is"),
        ("encoder-decoder", "encoder.onnx", thirteen_sources_wrong, "difference is"),
        ("encoder-decoder", "decoder.onnx", logits_of_thirteen_rows_wrong, "difference is"),
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
    write_graphs = export.write_graphs

    def write_mutant(quantized: Graphs, directory: Path) -> None:
        write_graphs(spoiled(quantized, file, mutate), directory)

    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: tiny_graphs(family)[1])
    monkeypatch.setattr(export, "write_graphs", write_mutant)

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


@pytest.mark.usefixtures("few_cases")
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
