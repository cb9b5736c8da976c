"""Turns an eager model into the graphs of a package.

`encoder.onnx` and `decoder.onnx` for a model that generates, `model.onnx` for a one-pass model;
their inputs and outputs are those of `engine/package/graph_io.py`.
"""

from __future__ import annotations

import copy
import logging
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import ConfigError
from engine.package.graph_io import GraphShape, decoder_shape, encoder_shape, one_pass_shape
from engine.package.manifest import Architecture, Contract, PackageFormat, Precision
from engine.wording import shortened
from exporter.graphs.arguments import arguments_of
from exporter.graphs.contracts import contract_of
from exporter.graphs.rewrite import simplify
from exporter.graphs.target import DEFAULT, DTYPES, Target
from exporter.models.cache import LayerCache
from exporter.models.config import TransformerConfig
from exporter.models.layers import OUTPUT_BIAS, EncoderOutput
from exporter.models.protocol import CachedDecoder, Generator, generator
from exporter.operators.bodies import attach_bodies
from exporter.operators.cross_attention import SourceRow
from exporter.operators.domain import OPSET, Functions
from exporter.operators.standard import emit_top, emit_write_row

_TORCH = Path(torch.__file__).parent

Graphs = Mapping[str, ir.Model]  # by the name of the file: "decoder.onnx", ...

# The softmax of onnxruntime's CUDA provider reads rows longer than a warp takes by 16 bytes, from
# where such a piece begins: else in which order a row is summed depends on its place.
_WARP_ROW = 1024
_PIECE = 4  # numbers in float32

# The softmax of onnxruntime's CPU provider adds up a row in few sums. In a long row the one with a
# likely token loses the small numbers: of 256,000 tokens up to 0.0002 of the logarithm.
_LONG_ROW = 65_536
_SHORT_ROW = 128


def build_graphs(
    model: nn.Module,
    *,
    target: Target = DEFAULT,
    precision: Precision = "fp32",
    functions: Functions | None = None,
) -> Graphs:
    """Export every graph of a model in eval mode; the model itself is left as it is.

    Weights, activations and cache are of `precision`; what leaves a graph is float32 and ids.
    `functions` compute the operators; without them, those of the target for this precision do.
    """
    config: TransformerConfig = model.config  # type: ignore[assignment]
    trace = _TRACES[config.architecture]
    contract = contract_of(config, PackageFormat.of(target.name, precision))
    graphs = trace(copy_in(DTYPES[precision], model), contract, target)
    for graph in graphs.values():
        for rewrite in (simplify, *target.rewrites):
            rewrite(graph)
        attach_bodies(graph, functions or target.functions[precision])
    return graphs


@contextmanager
def traced(name: str) -> Iterator[None]:
    """Say in one line where a model does what torch cannot trace."""
    try:
        yield
    except torch.onnx.OnnxExporterError as error:
        cause = error.__cause__ or error
        frames = traceback.extract_tb(cause.__traceback__)
        theirs = [one for one in frames if not Path(one.filename).is_relative_to(_TORCH)]
        where = f" at {theirs[-1].filename}, line {theirs[-1].lineno}" if theirs else ""
        raise ConfigError(
            f"{name} cannot be traced by torch.export{where}: "
            f"{shortened(str(cause).partition(chr(10))[0])}; no branch and no size may depend on "
            "what a tensor holds"
        ) from error


def copy_in(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    """Return a copy in which weights are of a type, but for those that stay in float32.

    The bias of the output is added to what leaves the graph: an import keeps tokens from being
    written by one of -1e30, which is minus infinity in float16, and no number that an engine can
    compute with. In float16 the second product of T5's feed-forward layers is computed in float32.
    """
    config: TransformerConfig = model.config  # type: ignore[assignment]
    weights = {  # made of this type at once, by the identity of those that they are copies of
        id(weight): nn.Parameter(weight.detach().to(dtype, copy=True), weight.requires_grad)
        for weight in model.parameters()
        if weight.is_floating_point()
    }
    copied = copy.deepcopy(model, weights).to(dtype)
    for name, weight in model.named_parameters():
        in_float32 = config.feed_forward.float32_output and dtype == torch.float16
        if name == OUTPUT_BIAS or (in_float32 and ".down_proj." in name):
            kept = nn.Parameter(weight.detach().float().clone(), requires_grad=False)
            owner, _, attribute = name.rpartition(".")
            setattr(copied.get_submodule(owner), attribute, kept)
    return copied


@torch.no_grad()
def widen_heads(decoder: CachedDecoder) -> None:
    """Widen every head of a decoder to the width of its cache, by zero weights.

    The kernels want one width for keys and values, a multiple of 8. A zero changes neither a dot
    product nor a sum, as long as the scale stays that of the narrow keys, which it does.
    Keys that are turned by rotary positions have that width already: TransformerConfig sees to it.
    """
    width = decoder.cache_head_dim
    for attention in decoder.attentions():
        num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
        for projection, count in (
            (attention.q_proj, num_heads),
            (attention.k_proj, num_kv_heads),
            (attention.v_proj, num_kv_heads),
        ):
            projection.weight = _widened(projection.weight, count, width)
            if projection.bias is not None:
                projection.bias = _widened(projection.bias, count, width)
        attention.key_dim = width
        if attention.out_proj is not None:  # else the output is cut to the width of values
            wide = _widened(attention.out_proj.weight.T, num_heads, width)
            attention.out_proj.weight = nn.Parameter(wide.T.contiguous())
            attention.value_dim = width


def _widened(weight: Tensor, num_heads: int, width: int) -> nn.Parameter:
    """Return [num_heads * width, ...] of [num_heads * d, ...], with zeros behind each head."""
    heads = weight.reshape(num_heads, -1, *weight.shape[1:])
    wide = heads.new_zeros(num_heads, width, *heads.shape[2:])
    wide[:, : heads.shape[1]] = heads
    return nn.Parameter(wide.flatten(0, 1))


def fold_scales(decoder: CachedDecoder) -> None:
    """Let the weights of queries carry the factor of their scores, where they attend to a source.

    On a CPU onnxruntime multiplies one query by its keys with a kernel of its own, if there is no
    factor: attention to a source takes 0.8 of the time at 25 tokens, 0.5 at 500.
    """
    for attention in decoder.cross_attentions():
        with torch.no_grad():
            for parameter in attention.q_proj.parameters():
                parameter.mul_(attention.scale)
        attention.scale = 1.0


class _DecoderOutput(NamedTuple):
    logits: Tensor  # [N, vocab_size]
    top_ids: Tensor  # [N, k]
    top_logits: Tensor  # [N, k]
    top_logprobs: Tensor  # [N, k]
    present: list[tuple[Tensor, Tensor]]
    alignment: Tensor | None  # [M, L]


class _DecoderGraph(nn.Module):
    """One step of a decoder: the newest tokens of every row in, the logits asked for out."""

    def __init__(self, decoder: CachedDecoder, *, in_pieces: bool) -> None:
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
        logits = self.decoder.logits_in_float32(rows)
        vocab_size = logits.shape[-1]
        # The best few leave the graph sorted: to look for them outside costs more than the head.
        top_logits, top_ids = emit_top(logits, num_top)
        if vocab_size > _LONG_ROW and not self._in_pieces:
            top_logprobs = _logprobs_of_long_rows(logits, top_logits)
        else:
            in_pieces = self._in_pieces and vocab_size > _WARP_ROW
            summed = _filled_up(logits, _PIECE) if in_pieces else logits
            top_logprobs = summed.log_softmax(-1).gather(1, top_ids)
        present = [(cache.key, cache.value) for cache in caches]
        alignment = caches[-1].alignment
        return _DecoderOutput(logits, top_ids, top_logits, top_logprobs, present, alignment)


def _filled_up(logits: Tensor, size: int) -> Tensor:
    """Return rows in whole pieces of a size; what is behind a row counts for nothing."""
    missing = -logits.shape[-1] % size
    return functional.pad(logits, (0, missing), value=-math.inf) if missing else logits


def _logprobs_of_long_rows(logits: Tensor, top_logits: Tensor) -> Tensor:
    """Return log-probabilities [N, k] of the likeliest, by sums of short pieces of a row."""
    largest = top_logits[:, :1]
    pieces = _filled_up(logits, _SHORT_ROW).view(logits.shape[0], -1, _SHORT_ROW)
    total = _log_sum_exp(_log_sum_exp(pieces) - largest)  # [N]
    return (top_logits - largest) - total[:, None]


def _log_sum_exp(x: Tensor) -> Tensor:
    """Reduce the last axis by a softmax, which is the fast kernel that sums a row in one order."""
    finite = x.clamp(min=torch.finfo(x.dtype).min)  # softmax of -inf alone is NaN
    return finite.amax(-1) - finite.log_softmax(-1).amax(-1)


class _EncoderGraph(nn.Module):
    """Reads sources of one length and writes their keys and values into the sources' rows."""

    def __init__(self, model: Generator) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, rows: Sequence[tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        memory = self.model.encode(input_ids)
        assert memory is not None, "it has a source"
        new = self.model.decoder.cross_key_values(memory)
        return [
            (emit_write_row(row_key, key), emit_write_row(row_value, value))
            for (row_key, row_value), (key, value) in zip(rows, new, strict=True)
        ]


class _OnePassGraph(nn.Module):
    """A text model that takes lengths in place of a mask."""

    def __init__(self, model: nn.Module, max_len: int) -> None:
        super().__init__()
        self.model = model
        places = torch.arange(max_len)
        self.places: Tensor  # [max_len]
        self.register_buffer("places", places, persistent=False)

    def forward(
        self, input_ids: Tensor, lengths: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        mask = self.places[: input_ids.shape[1]] < lengths[:, None]  # [B, S]
        if token_type_ids is None:
            return _in_float32(self.model(input_ids, mask))
        return _in_float32(self.model(input_ids, mask, token_type_ids))


class _VisionGraph(nn.Module):
    """A vision model that takes pixels in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        return _in_float32(self.model(pixel_values.to(next(self.model.parameters()).dtype)))


def _in_float32(output: EncoderOutput) -> tuple[Tensor, ...]:
    """Return what a model has of logits and vectors."""
    return tuple(part.float() for part in output if part is not None)


def weight_bytes(graphs: Graphs) -> int:
    """Return the bytes of the weights of graphs in files."""
    weights = [
        one.const_value for graph in graphs.values() for one in graph.graph.initializers.values()
    ]
    return sum(one.nbytes for one in weights if one is not None)


def _trace_decoder(model: nn.Module, contract: Contract, target: Target) -> Graphs:
    assert contract.generation is not None, "a model with a decoder generates"
    decoder = generator(model).decoder
    widen_heads(decoder)
    if target.has_unit_scales:
        fold_scales(decoder)
    module = _DecoderGraph(decoder, in_pieces=target.rows_in_pieces)
    shape = decoder_shape(contract.generation)
    graph = _export(module, shape)
    top = graph.graph.outputs[1:4]
    last = top[-1].producer()
    assert last is not None
    for value in last.inputs:  # the example's k is not part of the graph
        if value is not None and value not in top:
            value.shape = None
    for value in top:
        assert value.name is not None
        value.shape = ir.Shape(shape.outputs[value.name].shape)
    return {"decoder.onnx": graph}


def _trace_encoder_decoder(model: nn.Module, contract: Contract, target: Target) -> Graphs:
    generation = contract.generation
    assert generation is not None and generation.cross_cache is not None, "it has a source"
    decoder = _trace_decoder(model, contract, target)  # its heads are widened, for both graphs
    encoder = _export(_EncoderGraph(generator(model)), encoder_shape(generation.cross_cache))
    return {"encoder.onnx": encoder, **decoder}


def _trace_text_encoder(model: nn.Module, contract: Contract, target: Target) -> Graphs:
    assert contract.encoding is not None, "it reads texts"
    module = _OnePassGraph(model, contract.encoding.max_len)
    return {"model.onnx": _export(module, one_pass_shape(contract))}


def _trace_vision(model: nn.Module, contract: Contract, target: Target) -> Graphs:
    if target.patches_as_product:
        model.multiply_patches()  # type: ignore[operator]
    return {"model.onnx": _export(_VisionGraph(model), one_pass_shape(contract))}


_TRACES: Mapping[Architecture, Callable[[nn.Module, Contract, Target], Graphs]] = {
    "encoder-decoder": _trace_encoder_decoder,
    "decoder": _trace_decoder,
    "encoder": _trace_text_encoder,
    "vision-encoder": _trace_vision,
}


def _export(module: nn.Module, shape: GraphShape) -> ir.Model:
    given = arguments_of(shape.inputs)
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            module.eval(),
            kwargs=given.example,
            dynamic_shapes=given.shapes,
            input_names=list(shape.inputs),
            output_names=list(shape.outputs),
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
    level, is_fast = logger.level, torch.backends.mha.get_fastpath_enabled()
    logger.setLevel(logging.ERROR)
    torch.backends.mha.set_fastpath_enabled(False)  # torch's layers have a kernel that no graph has
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        torch.backends.mha.set_fastpath_enabled(is_fast)
