"""Inputs and outputs of a package's graphs, by name: for their export, check and use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from engine.errors import PackageError
from engine.package.manifest import CacheShape, Contract, GenerationContract
from engine.wording import listed

# Whoever exports, checks or binds a graph takes the names and types from here.
INPUT_IDS, POSITION_IDS = "input_ids", "position_ids"
LOGIT_IDX, NUM_TOP = "logit_idx", "num_top"
SEQLENS_K, TOTAL_SEQ = "seqlens_k", "total_seq"
SOURCE_LENGTHS, BEAM_ROWS, ROW_QUERIES = "source_lengths", "beam_rows", "row_queries"
ALIGNMENT_IDX, ALIGNMENT_SOURCES = "alignment_idx", "alignment_sources"
LENGTHS, PIXEL_VALUES, TOKEN_TYPE_IDS = "lengths", "pixel_values", "token_type_ids"
LOGITS, TOP_IDS, TOP_LOGITS, TOP_LOGPROBS = "logits", "top_ids", "top_logits", "top_logprobs"
ALIGNMENT, EMBEDDING = "alignment", "embedding"
LAST_COLUMN, TEMPERATURE, TOP_P = "last_column", "temperature", "top_p"
LEAST_SCORE, UNIFORM, SCOPE = "least_score", "uniform", "scope"
DRAWN_IDS, DRAWN_LOGPROBS = "drawn_ids", "drawn_logprobs"
# Prefixes of the names of keys and values, see `layer_names`.
PAST, PRESENT = "past_key_values", "present"  # the decoder's own positions, before and after a call
CROSS = "cross_key_values"  # the sources, as the decoder reads them
PAST_CROSS, PRESENT_CROSS = "past_cross_key_values", "present_cross_key_values"  # ... are encoded
READ_ON_HOST = (NUM_TOP, TOTAL_SEQ)  # inputs that kernels for a device want there

TOPS = (TOP_IDS, TOP_LOGITS, TOP_LOGPROBS)
DRAWN = (DRAWN_IDS, DRAWN_LOGPROBS)
# Packages for a device have them, by engine.sampling.plain.SamplingGraph.
SAMPLING_GRAPHS = ("draw.onnx", "draw_all.onnx", "draw_nucleus.onnx")

# numpy's names; keys and values have the type of their cache.
DTYPES = {
    **dict.fromkeys((INPUT_IDS, POSITION_IDS, LOGIT_IDX, NUM_TOP, TOP_IDS), "int64"),
    **dict.fromkeys((SEQLENS_K, TOTAL_SEQ), "int32"),
    **dict.fromkeys((SOURCE_LENGTHS, BEAM_ROWS, ROW_QUERIES), "int64"),
    **dict.fromkeys((ALIGNMENT_IDX, ALIGNMENT_SOURCES, LENGTHS, TOKEN_TYPE_IDS), "int64"),
    **dict.fromkeys((PIXEL_VALUES, LOGITS, TOP_LOGITS, TOP_LOGPROBS), "float32"),
    **dict.fromkeys((ALIGNMENT, EMBEDDING), "float32"),
    **dict.fromkeys((LAST_COLUMN, SCOPE, DRAWN_IDS), "int64"),
    **dict.fromkeys((TEMPERATURE, LEAST_SCORE), "float32"),
    **dict.fromkeys((TOP_P, UNIFORM, DRAWN_LOGPROBS), "float64"),
}
CACHE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}

_Shape = tuple[int | str | None, ...]  # an open size has a name or None
_TOKENS: _Shape = ("batch", "tokens")


class GraphValue(NamedTuple):
    """Type and shape of an input or output of a graph."""

    dtype: str  # numpy's name
    shape: _Shape

    @property
    def open_sizes(self) -> dict[int, str]:
        """The names of the sizes that differ from call to call, by axis."""
        return {axis: size for axis, size in enumerate(self.shape) if isinstance(size, str)}

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join('?' if n is None else str(n) for n in self.shape)}]"


Values = Mapping[str, GraphValue]


class GraphShape(NamedTuple):
    """Inputs and outputs of a graph by name, in its order; an open size has a name too."""

    inputs: Values
    outputs: Values


class Bound(Protocol):
    """An array that a graph is bound to, on the host or in memory of a device."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its axes."""

    def __getitem__(self, rows: slice, /) -> Bound:
        """Return some neighbouring rows, as a view."""


class LoadedGraph(Protocol):
    """A graph as it was loaded; `engine.session.Session` in production."""

    path: Path
    inputs: dict[str, GraphValue]
    outputs: dict[str, GraphValue]


def layer_names(prefix: str, num_layers: int) -> list[str]:
    """Return the names of all layers' keys and values, in the order of the graph."""
    return [f"{prefix}.{i}.{part}" for i in range(num_layers) for part in ("key", "value")]


def decoder_shape(contract: GenerationContract) -> GraphShape:
    """Return what `decoder.onnx` takes and gives, in the order of the graph.

    Keys and values are written in place: what is PRESENT is bound to what is PAST. There are
    several rows only where each has one token.
    """
    cache, cross = contract.cache, contract.cross_cache
    inputs = _values(
        {
            INPUT_IDS: _TOKENS,
            POSITION_IDS: _TOKENS,
            LOGIT_IDX: ("num_logits",),  # into the flattened [batch, tokens]
            NUM_TOP: (1,),  # k
            SEQLENS_K: ("batch",),  # each row's length after this call, minus 1
            TOTAL_SEQ: (1,),  # the largest length after this call
        }
    ) | _layers(PAST, cache, "batch")
    # The k largest, best first, the lower id among equals.
    top = dict.fromkeys(TOPS, ("num_logits", "num_top"))
    outputs = _values({LOGITS: ("num_logits", contract.vocab_size), **top})
    outputs |= _layers(PRESENT, cache, "batch")
    if cross is not None:
        beside: dict[str, _Shape] = {
            SOURCE_LENGTHS: ("sources",),
            # The rows that attend to each source, any row where there are fewer than `beams`.
            BEAM_ROWS: ("sources", "beams"),
            ROW_QUERIES: _TOKENS,  # each query's place in the flattened [sources, beams, tokens]
        }
        inputs |= _values(beside) | _layers(CROSS, cross, "sources")
        if contract.alignment:
            # The last layer's cross-attention of some positions, in the flattened [batch, tokens],
            # to the source of each: mean over the heads, 0 behind the end of the source; [0, 0]
            # where none is wanted, and nothing is computed.
            wanted = dict.fromkeys((ALIGNMENT_IDX, ALIGNMENT_SOURCES), ("num_alignments",))
            inputs |= _values(wanted)
            outputs |= _values({ALIGNMENT: ("num_alignments", cross.max_len)})
    return GraphShape(inputs, outputs)


def encoder_shape(cross: CacheShape) -> GraphShape:
    """Return what `encoder.onnx` takes and gives; it writes the first `tokens` positions."""
    return GraphShape(
        _values({INPUT_IDS: _TOKENS}) | _layers(PAST_CROSS, cross, "batch"),
        _layers(PRESENT_CROSS, cross, "batch"),
    )


def sampling_shapes(vocab_size: int) -> tuple[GraphShape, ...]:
    """Return what SAMPLING_GRAPHS take and give: the next tokens of the rows of a decode call.

    Whatever stands in a row beside them, with a last column and a scope of 0 they give the
    likeliest token.
    """
    asked = (
        LAST_COLUMN,  # place of the least likely token that the row draws from, counted from 0
        TEMPERATURE,  # above 0
        TOP_P,  # a share of the weight of these; infinity: all of it
        LEAST_SCORE,  # log of the smallest weight, where the largest is 1; -infinity: all
        UNIFORM,  # in [0, 1)
    )
    top: _Shape = ("rows", "num_top")
    one: _Shape = ("rows", 1)
    inputs: dict[str, _Shape] = {**dict.fromkeys(TOPS, top), **dict.fromkeys(asked, one)}
    # Graphs that go beyond the likeliest tokens take all logits, and engine.sampling.plain.Scope.
    further: dict[str, _Shape] = {**inputs, LOGITS: ("rows", vocab_size), SCOPE: one}
    drawn = _values(dict.fromkeys(DRAWN, one))
    return tuple(GraphShape(_values(each), drawn) for each in (inputs, further, further))


def one_pass_shape(contract: Contract) -> GraphShape:
    """Return what `model.onnx` takes and gives."""
    inputs: dict[str, _Shape]
    text, image = contract.encoding, contract.image
    if text is not None:
        inputs = {INPUT_IDS: _TOKENS, LENGTHS: ("batch",)}
        if text.num_token_types > 1:
            inputs[TOKEN_TYPE_IDS] = _TOKENS
        width = text.embedding_dim
    else:
        assert image is not None, "a one-pass model reads text or sees images"
        inputs = {PIXEL_VALUES: ("batch", image.channels, image.size, image.size)}
        width = image.embedding_dim
    per_token = ("tokens",) if contract.task == "label" else ()
    outputs: dict[str, _Shape] = {}
    if contract.labels:
        outputs[LOGITS] = ("batch", *per_token, len(contract.labels))
    if width is not None:
        outputs[EMBEDDING] = ("batch", width)
    return GraphShape(_values(inputs), _values(outputs))


def check_graphs(*graphs: tuple[LoadedGraph, GraphShape]) -> None:
    """Raise PackageError, naming every difference, unless the graphs are as they are described.

    A size that is fixed here may be open in the graph: what it then gives is seen when it runs.
    """
    found = [problem for graph, wanted in graphs for problem in _differences(graph, wanted)]
    if found:
        raise PackageError(
            f"{graphs[0][0].path.parent}: the graphs are not those of the manifest: "
            f"{listed(found, '; ')}; export the model again"
        )


def _differences(graph: LoadedGraph, wanted: GraphShape) -> list[str]:
    """Return a sentence a difference; those of all layers are one, which names the first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for kind, expected, found in (
        ("input", wanted.inputs, graph.inputs),
        ("output", wanted.outputs, graph.outputs),
    ):
        problems: list[tuple[str, str, str]] = []  # a name, and what to write before and behind it
        for name, value in expected.items():
            if name not in found:
                problems.append((name, f"missing {kind}", f", {value}"))
            elif not _fits(found[name], value):
                problems.append((name, kind, f" is {found[name]}, the manifest's {value}"))
        unknown = sorted(found.keys() - expected.keys())
        problems += [(name, f"unknown {kind}", "") for name in unknown]
        for name, before, behind in problems:
            of_any_layer = re.sub(r"\.\d+\.(key|value)$", "", name)
            groups.setdefault((of_any_layer, before, behind), []).append(name)
    sentences = []
    for (_, before, behind), (first, *others) in groups.items():
        like_it = f" and {len(others)} like it" if others else ""
        sentences.append(f"{graph.path.name}: {before} {first}{like_it}{behind}")
    return sentences


def _fits(found: GraphValue, wanted: GraphValue) -> bool:
    if found.dtype != wanted.dtype or len(found.shape) != len(wanted.shape):
        return False
    return all(
        not isinstance(size, int) or size == allowed
        for size, allowed in zip(found.shape, wanted.shape, strict=True)
    )


def _values(shapes: Mapping[str, _Shape]) -> dict[str, GraphValue]:
    return {name: GraphValue(DTYPES[name], shape) for name, shape in shapes.items()}


def _layers(prefix: str, shape: CacheShape, rows: str) -> dict[str, GraphValue]:
    size = (rows, shape.num_kv_heads, shape.max_len, shape.head_dim)
    value = GraphValue(CACHE_DTYPES[shape.dtype], size)
    return dict.fromkeys(layer_names(prefix, shape.num_layers), value)
