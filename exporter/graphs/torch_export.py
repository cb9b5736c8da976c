"""Turns an eager model into the graphs of a package.

`encoder.onnx` and `decoder.onnx` for a model that generates, `model.onnx` for a one-pass model;
their inputs and outputs are those of the contracts in `engine/package/graph_io.py`.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.package.manifest import Precision
from exporter.graphs.rewrite import simplify
from exporter.graphs.target import CPU, DTYPES, Target
from exporter.models import GPT, Bert, EncoderDecoder, Labeller, ViT
from exporter.models.attention import MultiHeadAttention
from exporter.models.cache import LayerCache, cache_head_dim
from exporter.models.config import TransformerConfig
from exporter.models.layers import Decoder
from exporter.operators.bodies import attach_bodies
from exporter.operators.cross_attention import SourceRow
from exporter.operators.domain import OPSET, Functions
from exporter.operators.top_k import emit_top
from exporter.operators.write_row import emit_write_row

Graphs = Mapping[str, ir.Model]  # by the name of the file: "decoder.onnx", ...

# The softmax of onnxruntime's CUDA provider reads rows longer than a warp takes by 16 bytes, from
# where such a piece begins: else in which order a row is summed depends on its place.
_WARP_ROW = 1024
_PIECE = 4  # numbers in float32


def build_graphs(
    model: nn.Module,
    *,
    target: Target = CPU,
    precision: Precision = "fp32",
    functions: Functions | None = None,
) -> Graphs:
    """Export every graph of a model in eval mode; the model itself is left as it is.

    Weights, activations and cache are of `precision`; what leaves a graph is float32 and ids.
    `functions` compute the operators; without them, those of the target for this precision do.
    """
    graphs = _traced(_copy_in(DTYPES[precision], model), target)
    for graph in graphs.values():
        simplify(graph)
        if target.fuse:
            target.fuse(graph)
        attach_bodies(graph, functions or target.functions[precision])
    return graphs


def _traced(model: nn.Module, target: Target) -> Graphs:
    match model:
        case EncoderDecoder():
            widen_heads(model.decoder)
            return {
                "encoder.onnx": _export_encoder(model),
                "decoder.onnx": _export_decoder(model, target),
            }
        case GPT():
            widen_heads(model.decoder)
            return {"decoder.onnx": _export_decoder(model, target)}
        case ViT():
            model.embeddings.patches_as_product = target.patches_as_product
            return {"model.onnx": _export_vision(model)}
        case Bert() | Labeller():
            return {"model.onnx": _export_one_pass(model)}
        case _:
            raise TypeError(f"{type(model).__name__} is no model of exporter.models")


def _copy_in(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    """Return a copy in which all weights are of a type but the bias of the output, in float32.

    It is added to what leaves the graph: an import keeps tokens from being written by one of -1e30,
    which is minus infinity in float16, and no number that an engine can compute with.
    """
    copied = copy.deepcopy(model).to(dtype)
    if isinstance(copied, GPT | EncoderDecoder) and copied.decoder.output.bias is not None:
        bias = model.get_parameter("decoder.output.bias").detach().float()
        copied.decoder.output.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return copied


def widen_heads(decoder: Decoder) -> None:
    """Widen every head of a decoder to the width of its cache, by zero weights.

    The kernels want one width for keys and values, a multiple of 8. A zero changes neither a dot
    product nor a sum, as long as the scale stays that of the narrow keys, which it does.
    Keys that are turned by rotary positions have that width already: TransformerConfig sees to it.
    """
    for attention in decoder.modules():
        if isinstance(attention, MultiHeadAttention):
            width = decoder.cache_head_dim
            _widen_rows(attention.q_proj, attention.num_heads, width)
            for projection in (attention.k_proj, attention.v_proj):
                _widen_rows(projection, attention.num_kv_heads, width)
            attention.key_dim = width
            if attention.out_proj is not None:  # else the output is cut to the width of values
                _widen_columns(attention.out_proj, attention.num_heads, width)
                attention.value_dim = width


def _widen_rows(projection: nn.Linear, num_heads: int, width: int) -> None:
    def widen(weight: Tensor) -> nn.Parameter:  # [num_heads * d, ...]
        heads = weight.view(num_heads, -1, *weight.shape[1:])
        wide = heads.new_zeros(num_heads, width, *heads.shape[2:])
        wide[:, : heads.shape[1]] = heads
        return nn.Parameter(wide.flatten(0, 1))

    with torch.no_grad():
        projection.weight = widen(projection.weight)
        if projection.bias is not None:
            projection.bias = widen(projection.bias)


def _widen_columns(projection: nn.Linear, num_heads: int, width: int) -> None:
    with torch.no_grad():
        # [d_model, num_heads, d]
        heads = projection.weight.view(-1, num_heads, projection.in_features // num_heads)
        wide = heads.new_zeros(heads.shape[0], num_heads, width)
        wide[..., : heads.shape[2]] = heads
        projection.weight = nn.Parameter(wide.flatten(1))


class _DecoderOutput(NamedTuple):
    logits: Tensor  # [N, vocab_size]
    top_ids: Tensor  # [N, k]
    top_logits: Tensor  # [N, k]
    top_logprobs: Tensor  # [N, k]
    present: list[tuple[Tensor, Tensor]]
    alignment: Tensor | None  # [M, L]


class _DecoderGraph(nn.Module):
    """One step of a decoder: the newest tokens of every row in, the logits asked for out."""

    def __init__(self, decoder: Decoder, *, in_pieces: bool) -> None:
        """`in_pieces`: where rows begin decides how they are summed."""
        super().__init__()
        self.decoder = decoder
        self._in_pieces = in_pieces

    def forward(
        self,
        input_ids: Tensor,  # [B, S]
        position_ids: Tensor,  # [B, S]
        logit_idx: Tensor,  # [N]
        num_top: Tensor,  # [1]
        seqlens_k: Tensor,  # [B]
        total_seq: Tensor,  # [1]
        past: Sequence[tuple[Tensor, Tensor]],
        source_lengths: Tensor | None = None,  # [C]
        beam_rows: Tensor | None = None,  # [C, G]
        row_queries: Tensor | None = None,  # [B, S]
        cross: Sequence[tuple[Tensor, Tensor]] | None = None,
        alignment_idx: Tensor | None = None,  # [M]
        alignment_sources: Tensor | None = None,  # [M]
    ) -> _DecoderOutput:
        caches = [LayerCache(key, value, seqlens_k, total_seq, position_ids) for key, value in past]
        if cross is not None:
            assert source_lengths is not None and beam_rows is not None and row_queries is not None
            for cache, (key, value) in zip(caches, cross, strict=True):
                cache.cross = SourceRow(key, value, source_lengths, beam_rows, row_queries)
            caches[-1].alignment_idx = alignment_idx
            caches[-1].alignment_sources = alignment_sources
        hidden = self.decoder.hidden_states(input_ids, position_ids=position_ids, caches=caches)
        # The head is the largest product of a small model: only the rows that are asked for.
        rows = hidden.flatten(0, 1).index_select(0, logit_idx)  # [N, d_model]
        logits = _logits(self.decoder.output, rows)
        # The best few leave the graph sorted: to look for them outside costs more than the head.
        top_logits, top_ids = emit_top(logits, num_top)
        summed = _whole_pieces(logits) if self._in_pieces else logits
        top_logprobs = summed.log_softmax(-1).gather(1, top_ids)
        present = [(cache.key, cache.value) for cache in caches]
        alignment = caches[-1].alignment
        return _DecoderOutput(logits, top_ids, top_logits, top_logprobs, present, alignment)


def _logits(output: nn.Linear, rows: Tensor) -> Tensor:
    if output.weight.dtype == torch.float32 or output.bias is None:
        logits: Tensor = output(rows).float()
        return logits
    return functional.linear(rows, output.weight).float() + output.bias


def _whole_pieces(logits: Tensor) -> Tensor:
    """Return rows of which each begins with a piece; what is behind a row counts for nothing."""
    missing = -logits.shape[-1] % _PIECE
    if logits.shape[-1] <= _WARP_ROW or not missing:
        return logits
    return functional.pad(logits, (0, missing), value=-math.inf)


class _EncoderGraph(nn.Module):
    """Reads sources of one length and writes their keys and values into the sources' rows."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, rows: Sequence[tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        new = self.model.decoder.cross_key_values(self.model.encode(input_ids))
        return [
            (emit_write_row(row_key, key), emit_write_row(row_value, value))
            for (row_key, row_value), (key, value) in zip(rows, new, strict=True)
        ]


class _OnePassGraph(nn.Module):
    """A text model that takes lengths in place of a mask."""

    def __init__(self, model: Bert | Labeller) -> None:
        super().__init__()
        self.model = model
        places = torch.arange(model.config.max_source_len)
        self.places: Tensor  # [max_source_len]
        self.register_buffer("places", places, persistent=False)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.places[: input_ids.shape[1]] < lengths[:, None]  # [B, S]
        output = self.model(input_ids, mask)
        return output.logits.float(), output.embedding.float()


class _VisionGraph(nn.Module):
    """A vision model that takes pixels in float32."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(pixel_values.to(_dtype_of(self.model)))
        return output.logits.float(), output.embedding.float()


class _Inputs(NamedTuple):
    """Inputs of a graph: an example of each argument, its open sizes, and the graph's names."""

    example: dict[str, Any]
    shapes: dict[str, Any]
    names: list[str]


def _export_decoder(model: EncoderDecoder | GPT, target: Target) -> ir.Model:
    config, batch = model.config, 2  # of the example; sizes of 1 would become constants
    dtype = _dtype_of(model)
    example, shapes, names = _decoder_inputs(config, batch, dtype)
    outputs = ["logits", "top_ids", "top_logits", "top_logprobs"]
    outputs += _cache_names("present", config.num_decoder_layers)
    if isinstance(model, EncoderDecoder):
        of_source = _source_inputs(config, batch, dtype)
        example |= of_source.example
        shapes |= of_source.shapes
        names += of_source.names
        outputs.append("alignment")
    decoder = _DecoderGraph(model.decoder, in_pieces=target.rows_in_pieces)
    graph = _export(decoder, example, shapes, names, outputs)
    for value in graph.graph.outputs[1:4]:  # the example's k is no part of the graph
        value.shape = ir.Shape(["num_logits", "num_top"])
    return graph


def _decoder_inputs(config: TransformerConfig, batch: int, dtype: torch.dtype) -> _Inputs:
    tokens, past = 3, _example_rows(config, batch, config.max_target_len, dtype)
    example = {
        "input_ids": torch.zeros(batch, tokens, dtype=torch.int64),
        "position_ids": torch.zeros(batch, tokens, dtype=torch.int64),
        "logit_idx": torch.zeros(2, dtype=torch.int64),
        "num_top": torch.full((1,), 2),
        "seqlens_k": torch.zeros(batch, dtype=torch.int32),
        "total_seq": torch.zeros(1, dtype=torch.int32),
    }
    shapes: dict[str, Any] = {
        "input_ids": {0: "batch", 1: "tokens"},
        "position_ids": {0: "batch", 1: "tokens"},
        "logit_idx": {0: "num_logits"},
        "num_top": {},
        "seqlens_k": {0: "batch"},
        "total_seq": {},
        "past": [({0: "batch"}, {0: "batch"}) for _ in past],
    }
    names = [*example, *_cache_names("past_key_values", len(past))]
    return _Inputs({**example, "past": past}, shapes, names)


def _source_inputs(config: TransformerConfig, batch: int, dtype: torch.dtype) -> _Inputs:
    """Return what a decoder with cross-attention takes besides."""
    sources = 3
    cross = _example_rows(config, sources, config.max_source_len, dtype)
    example = {
        "source_lengths": torch.ones(sources, dtype=torch.int64),
        "beam_rows": torch.zeros(sources, 2, dtype=torch.int64),
        "row_queries": torch.zeros(batch, 3, dtype=torch.int64),
        "cross": cross,
        "alignment_idx": torch.zeros(5, dtype=torch.int64),
        "alignment_sources": torch.zeros(5, dtype=torch.int64),
    }
    shapes = {
        "source_lengths": {0: "sources"},
        "beam_rows": {0: "sources", 1: "beams"},
        "row_queries": {0: "batch", 1: "tokens"},
        "cross": [({0: "sources"}, {0: "sources"}) for _ in cross],
        "alignment_idx": {0: "num_alignments"},
        "alignment_sources": {0: "num_alignments"},
    }
    names = ["source_lengths", "beam_rows", "row_queries"]
    names += [*_cache_names("cross_key_values", len(cross)), "alignment_idx", "alignment_sources"]
    return _Inputs(example, shapes, names)


def _export_encoder(model: EncoderDecoder) -> ir.Model:
    batch = 2
    rows = _example_rows(model.config, batch, model.config.max_source_len, _dtype_of(model))
    example = {"input_ids": torch.zeros(batch, 3, dtype=torch.int64), "rows": rows}
    shapes = {
        "input_ids": {0: "batch", 1: "tokens"},
        "rows": [({0: "batch"}, {0: "batch"}) for _ in rows],
    }
    names = ["input_ids", *_cache_names("past_cross_key_values", len(rows))]
    outputs = _cache_names("present_cross_key_values", len(rows))
    return _export(_EncoderGraph(model), example, shapes, names, outputs)


def _export_one_pass(model: Bert | Labeller) -> ir.Model:
    example = {
        "input_ids": torch.zeros(2, 3, dtype=torch.int64),
        "lengths": torch.tensor([3, 2]),
    }
    shapes = {"input_ids": {0: "batch", 1: "tokens"}, "lengths": {0: "batch"}}
    return _export(_OnePassGraph(model), example, shapes, list(example), ["logits", "embedding"])


def _export_vision(model: ViT) -> ir.Model:
    image = model.config.image
    assert image is not None, "TransformerConfig demands it of a vit"
    example = {"pixel_values": torch.zeros(2, image.channels, image.size, image.size)}
    shapes = {"pixel_values": {0: "batch"}}
    return _export(_VisionGraph(model), example, shapes, list(example), ["logits", "embedding"])


def _example_rows(
    config: TransformerConfig, batch: int, length: int, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    size = (batch, config.kv_heads, length, cache_head_dim(config))
    row = torch.zeros(size, dtype=dtype)
    return [(row.clone(), row.clone()) for _ in range(config.num_decoder_layers)]


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _cache_names(prefix: str, num_layers: int) -> list[str]:
    return [f"{prefix}.{i}.{part}" for i in range(num_layers) for part in ("key", "value")]


def _export(
    module: nn.Module,
    example: Mapping[str, Any],
    shapes: Mapping[str, Any],
    input_names: Sequence[str],
    output_names: Sequence[str],
) -> ir.Model:
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            module.eval(),
            kwargs=dict(example),
            dynamic_shapes=dict(shapes),
            input_names=list(input_names),
            output_names=list(output_names),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    return program.model


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter from telling of its own use of deprecated functions, and of torchvision."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
