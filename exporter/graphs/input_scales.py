"""Fixes the scales by which products round their inputs: by the range that these have on a text.

The graphs run in float32, before anything is rounded, and say the least and the largest number that
every product reads. Numbers beyond these are cut off later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engine.package.graph_io import (
    CROSS,
    INPUT_IDS,
    LOGIT_IDX,
    NUM_TOP,
    POSITION_IDS,
    PRESENT_CROSS,
    ROW_QUERIES,
    SEQLENS_K,
    SOURCE_LENGTHS,
    TOTAL_SEQ,
    Values,
    decoder_shape,
    encoder_shape,
)
from engine.package.manifest import GenerationContract
from engine.session import create_session
from exporter.files import scratch_directory, writing_scratch
from exporter.graphs.torch_export import Graphs, weight_bytes
from exporter.graphs.weights import FixedScale, inputs_of_products
from exporter.samples import Tokens

_STEPS = 255
_LEAST, _LARGEST = ".least", ".largest"  # behind the name of an input: outputs that tell its range

Passage = tuple[Tokens, Tokens]  # a source, () without an encoder, and what is written behind it
Arrays = Mapping[str, NDArray[Any]]


def fixed_scales(
    graphs: Graphs, contract: GenerationContract, text: Sequence[Passage]
) -> dict[str, dict[str, FixedScale]]:
    """Return the scales of the inputs of all products, by graph and name."""
    cross = contract.cross_cache
    with scratch_directory("scales") as folder:
        with writing_scratch(weight_bytes(graphs)):
            watched = {name: _Watched(graph, folder / name) for name, graph in graphs.items()}
        for source, target in text:
            places = np.arange(len(target))
            given: dict[str, Any] = {  # all of the target in one call
                INPUT_IDS: [target],
                POSITION_IDS: [places],
                LOGIT_IDX: places,
                NUM_TOP: 1,
                SEQLENS_K: len(target) - 1,
                TOTAL_SEQ: len(target),
                SOURCE_LENGTHS: len(source),
                ROW_QUERIES: [places],
            }
            if cross is not None:
                inputs = _filled(encoder_shape(cross).inputs, {INPUT_IDS: [source]})
                rows = watched["encoder.onnx"].run(inputs)
                given |= {name.replace(PRESENT_CROSS, CROSS): rows[name] for name in rows}
            watched["decoder.onnx"].run(_filled(decoder_shape(contract).inputs, given))
    return {name: graph.scales for name, graph in watched.items()}


class _Watched:
    """A graph, and the range of what each of its products has read; 0 is always inside."""

    def __init__(self, model: ir.Model, path: Path) -> None:
        """Write a graph that tells ranges to a file, and load it; the model stays as it is."""
        graph, names = model.graph, inputs_of_products(model.graph)
        values = {value.name: value for node in graph for value in node.outputs}
        nodes = []
        for name in names:
            for op_type, end in (("ReduceMin", _LEAST), ("ReduceMax", _LARGEST)):
                node = ir.node(op_type, [values[name]], {"keepdims": 0})
                node.outputs[0].name, node.outputs[0].type = f"{name}{end}", values[name].type
                nodes.append(node)
        before = len(graph.outputs)
        graph.extend(nodes)
        graph.outputs.extend(node.outputs[0] for node in nodes)
        try:
            ir.save(model, path, external_data=f"{path.name}.data")
        finally:
            del graph.outputs[before:]
            graph.remove(nodes, safe=True)
        self._session = create_session(path)
        self._least, self._largest = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)

    def run(self, inputs: Arrays) -> Arrays:
        """Run once, and take in what was read."""
        outputs = self._session.run(inputs)
        for name in self._least:
            self._least[name] = min(self._least[name], float(outputs[f"{name}{_LEAST}"]))
            self._largest[name] = max(self._largest[name], float(outputs[f"{name}{_LARGEST}"]))
        return outputs

    @property
    def scales(self) -> dict[str, FixedScale]:
        """The scales with which the ranges take all of 8 bits, and 0 is one of their numbers."""
        found = {}
        for name, least in self._least.items():
            scale = (self._largest[name] - least) / _STEPS or 1.0
            found[name] = FixedScale(np.float32(scale), np.uint8(round(-least / scale)))
        return found


def _filled(shapes: Values, given: Mapping[str, Any]) -> Arrays:
    """Return the inputs of a call with one row: what is given, else zeros."""
    tokens = len(given[INPUT_IDS][0])
    sizes = {"tokens": tokens, "num_logits": tokens, "num_alignments": 0}
    inputs = {}
    for name, value in shapes.items():
        shape = [n if isinstance(n, int) else sizes.get(str(n), 1) for n in value.shape]
        inputs[name] = np.zeros(shape, value.dtype)
        inputs[name][...] = given.get(name, 0)
    return inputs
