"""Changes exported graphs by hand, as faults of an exporter would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from engine.errors import CertificateError
from exporter.checkpoint import Checkpoint
from exporter.export import export_package
from exporter.graphs.torch_export import Graphs

Mutation = Callable[["Surgery"], None]
Spoil = Callable[..., Checkpoint]  # a family's, by a file and a mutation, with options

DECODERS = ("encoder-decoder", "gpt")
# The place of a fault, or that a graph does not run at all.
PLACE = r"source of \d|prompt of \d|text of \d|image \d|cannot be run"


class Mutants(dict[tuple[str, str], tuple[str, Mutation]]):
    """Faults by family and name: the graph that has one, and what puts it there."""

    def of(self, *families: str, file: str) -> Callable[[Mutation], Mutation]:
        """Return a decorator that adds a fault of a graph of these families."""

        def add(mutation: Mutation) -> Mutation:
            for family in families:
                self[family, mutation.__name__] = file, mutation
            return mutation

        return add

    @property
    def cases(self) -> list[Any]:
        """Families and names; a fault of several families has the long tests for all but one."""
        last = {name: family for family, name in self}
        return [
            pytest.param(*key, marks=() if last[key[1]] == key[0] else pytest.mark.long)
            for key in self
        ]


def spoiled(graphs: Graphs, file: str, mutate: Mutation) -> Graphs:
    """Return graphs of which one has a fault."""
    surgery = Surgery(graphs[file])
    mutate(surgery)
    return {**graphs, file: surgery.graph()}


def refuse(checkpoint: Checkpoint, tmp_path: Path, message: str = PLACE) -> str:
    """Demand that an export is refused, and leaves nothing; return what it says."""
    with pytest.raises(CertificateError, match=message) as caught:
        export_package(checkpoint, tmp_path / "package")
    assert list(tmp_path.iterdir()) == []
    return str(caught.value)


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

    def reversed_rows(self, name: str) -> str:
        slice_of = [np.array([value], np.int64) for value in (-1, -100, 0, -1)]
        return self.compute("Slice", name, *slice_of)

    def is_chunk(self) -> str:
        """Return 1 for several tokens a row, 0 for one: int64 [1]."""
        tokens = self.compute_before(self.model.graph.node[0], "Shape", "input_ids", start=1, end=2)
        node = self.model.graph.node[1]
        return self.compute_before(
            node, "Sign", self.compute_before(node, "Sub", tokens, np.array([1], np.int64))
        )

    def rows_of_logits(self) -> onnx.NodeProto:
        return next(node for node in self.nodes("Gather") if node.input[1] == "logit_idx")

    def is_count(self, node: onnx.NodeProto, value: str, count: int, axis: int = 0) -> str:
        """Return 1.0 where a value has so many rows (or columns, with `axis` 1), else 0.0."""
        size = self.compute_before(node, "Shape", value, start=axis, end=axis + 1)
        is_so = self.compute_before(node, "Equal", size, np.array([count], np.int64))
        return self.compute_before(node, "Cast", is_so, to=onnx.TensorProto.FLOAT)

    def more(self, node: onnx.NodeProto, value: str, flag: str) -> str:
        added = self.compute_before(node, "Mul", flag, np.array([5], np.float32))
        return self.compute_before(node, "Add", value, added)

    def spoil_output(
        self, output: str, count: int, *, of: str | None = None, axis: int = 0
    ) -> None:
        """Change an output where it, or an input, has so many rows or columns."""

        def wrong(old: str) -> str:
            flag = self.is_count(self.last, of or old, count, axis)
            return self.more(self.last, old, flag)

        self.change_output(output, wrong)

    def zero_rows(self, output: str, first: int, rank: int) -> None:
        def wrong(old: str) -> str:
            kept = self.is_row(self.last, "Less", old, first, rank)
            return self.compute_before(self.last, "Mul", old, kept)

        self.change_output(output, wrong)
