"""Plans the call that gives every decoding sequence its next logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.errors import ConfigError
from engine.package.graph_io import (
    ALIGNMENT,
    ALIGNMENT_IDX,
    ALIGNMENT_SOURCES,
    BEAM_ROWS,
    INPUT_IDS,
    LOGIT_IDX,
    NUM_TOP,
    POSITION_IDS,
    ROW_QUERIES,
    SEQLENS_K,
    SOURCE_LENGTHS,
    Bound,
)
from engine.session import NOT_CAPTURED, Binding
from engine.slots.calls.decoder_graph import DecoderGraph
from engine.slots.calls.graph_call import GraphCall, named_outputs
from engine.slots.calls.source_index import SourceIndex, SourceShape
from engine.slots.step_block import StepBlock

CAPTURED_TOPS = (1, 128)  # numbers of largest logits; a call for others is never captured

_MAX_BINDINGS = 256


class _Shape(NamedTuple):
    """All that a binding of a decode call depends on."""

    num_rows: int
    sources: SourceShape
    num_top: int
    num_aligned: int


class _Bound(NamedTuple):
    binding: Binding
    graph_id: int


class DecodeCalls:
    """Appends a token to each of the first rows, in one call.

    A call with `buckets` has as many rows as the smallest of them that holds the decoding ones, and
    as many sources. A row of padding, be it empty, in the middle of its prompt or a cached prefix,
    gets a token too, which is written behind the tokens of the row: the row's next token will
    be written there before anything reads it. A full row has it written over its last position,
    which only the token there itself has ever read.

    Every source has room for a `group` of rows, so that a call is of one shape however many a
    source has. A call in which one has more is of another shape, and never captured.
    """

    def __init__(
        self,
        graph: DecoderGraph,
        block: StepBlock,
        buckets: Sequence[int] = (),
        *,
        group: int = 1,
    ) -> None:
        self._graph = graph
        self._block = block
        self._buckets = buckets
        num_slots = len(graph.cache.lengths)
        if buckets and max(buckets) < num_slots:
            raise ConfigError(
                f"the largest decode bucket ({max(buckets)}) must be the number of rows, "
                f"{num_slots}"
            )
        self._input_ids = block.persistent_input(INPUT_IDS, (num_slots, 1))
        self.input_ids = self._input_ids.bound  # the graph reads the tokens of row 0, 1, ... here
        self._position_ids = block.persistent_input(POSITION_IDS, (num_slots, 1))
        self._seqlens_k = block.persistent_input(SEQLENS_K, (num_slots,))
        self._logit_idx = block.persistent_input(LOGIT_IDX, (num_slots,))
        self._logit_idx.host[:] = np.arange(num_slots)
        self._source_lengths = block.persistent_input(SOURCE_LENGTHS, (num_slots,))
        self._row_queries = block.persistent_input(ROW_QUERIES, (num_slots, 1))
        self._group = group
        # Read where no source has more rows.
        self._beam_rows = block.persistent_input(BEAM_ROWS, (num_slots, group))
        self._alignment_idx = block.persistent_input(ALIGNMENT_IDX, (num_slots,))
        self._alignment_sources = block.persistent_input(ALIGNMENT_SOURCES, (num_slots,))
        self._index = SourceIndex(num_slots, group)
        self._bindings: dict[_Shape, _Bound] = {}

    def num_rows(self, num_decoding: int, sources: Sequence[int]) -> int:
        """Return how many rows the call of a step has; 0: there is none."""
        if not num_decoding or not self._buckets:
            return num_decoding
        wanted = max(num_decoding, max(sources, default=0) + 1)
        return min(bucket for bucket in self._buckets if bucket >= wanted)

    def plan(
        self,
        token_ids: Sequence[int],
        sources: Sequence[int],
        num_rows: int,
        num_top: int,
        aligned: Sequence[int],
    ) -> tuple[GraphCall, int]:
        """Return the call, counting its tokens as computed, and how many rows are for nobody.

        It has `num_rows` rows, as the method of that name has said. Row i attends to the source in
        row sources[i]. The attention of the rows in `aligned` is wanted. Chunks of the step are to
        be planned before.
        """
        B, M = len(token_ids), num_rows
        longest = self._place_tokens(token_ids, M)
        inputs: dict[str, Bound] = {}
        of_sources, num_queries = SourceShape(0, self._group), M
        if self._graph.cache.cross_layers:
            of_sources = self._place_sources(sources, M if self._buckets else 0, inputs)
            num_queries = of_sources.num_queries // self._group
        outputs: dict[str, Bound] = {}
        if aligned:
            self._alignment_idx.host[: len(aligned)] = aligned
            self._alignment_sources.host[: len(aligned)] = [sources[row] for row in aligned]
            outputs[ALIGNMENT] = self._block.alignment(0, len(aligned))
        bound = self._bound(_Shape(M, of_sources, num_top, len(aligned)))
        self._graph.cache.lengths[:B] += 1
        total_seq = self._graph.total_of(longest)
        return GraphCall(bound.binding, inputs, outputs, total_seq, bound.graph_id), num_queries - B

    def _place_tokens(self, token_ids: Sequence[int], M: int) -> int:
        """Write the tokens and where they go; return the length of the longest row after it."""
        B, starts = len(token_ids), self._seqlens_k.host[:M]
        # The kernel wants the length after the call minus 1: with one token, that before it.
        starts[:] = self._graph.cache.lengths[:M]
        self._input_ids.host[:B, 0] = token_ids
        if M > B:
            self._input_ids.host[B:M] = 0
            np.minimum(starts[B:], self._graph.contract.cache.max_len - 1, out=starts[B:])
        self._position_ids.host[:M, 0] = starts
        lengths: list[int] = starts.tolist()  # faster than numpy's maximum for a few numbers
        return max(lengths) + 1

    def _place_sources(
        self, sources: Sequence[int], num_sources: int, inputs: dict[str, Bound]
    ) -> SourceShape:
        """Write which rows attend to which source; what is bound anew is put into `inputs`."""
        index = self._index
        if index.update(sources, num_sources):
            self._row_queries.host[:] = index.row_queries
            if index.shape.group == self._group:
                self._beam_rows.host[: index.shape.num_sources] = index.beam_rows
        count = index.shape.num_sources
        # The kernel wants a key in an empty row too.
        lengths = self._graph.cache.source_lengths[:count]
        np.maximum(lengths, 1, out=self._source_lengths.host[:count])
        if index.shape.group > self._group:
            inputs[BEAM_ROWS] = self._block.add(BEAM_ROWS, index.beam_rows)
        return index.shape

    def _bound(self, shape: _Shape) -> _Bound:
        bound = self._bindings.get(shape)
        if bound is None:
            if len(self._bindings) >= _MAX_BINDINGS:  # captured ones stay: capturing takes long
                kept = self._bindings.items()
                self._bindings = {k: b for k, b in kept if b.graph_id != NOT_CAPTURED}
            bound = self._bindings[shape] = _Bound(self._bind(shape), self._graph_id(shape))
        return bound

    def _graph_id(self, shape: _Shape) -> int:
        vocab_size = self._graph.contract.vocab_size
        is_captured = (
            self._graph.is_on_device
            and shape.num_top in {min(k, vocab_size) for k in CAPTURED_TOPS}
            and shape.sources.group == self._group
            and not shape.num_aligned
        )
        return next(self._graph.graph_ids) if is_captured else NOT_CAPTURED

    def _bind(self, shape: _Shape) -> Binding:
        M, (num_sources, group) = shape.num_rows, shape.sources
        binding = self._graph.bind(0, M)
        binding.input(INPUT_IDS, self._input_ids.bound[:M])
        binding.input(POSITION_IDS, self._position_ids.bound[:M])
        binding.input(SEQLENS_K, self._seqlens_k.bound[:M])
        binding.input(LOGIT_IDX, self._logit_idx.bound[:M])
        binding.input(NUM_TOP, self._graph.num_top(shape.num_top))
        if num_sources:
            self._graph.bind_sources(binding, 0, num_sources)
            binding.input(SOURCE_LENGTHS, self._source_lengths.bound[:num_sources])
            binding.input(ROW_QUERIES, self._row_queries.bound[:M])
            if group == self._group:
                binding.input(BEAM_ROWS, self._beam_rows.bound[:num_sources])
        if self._graph.contract.alignment:
            binding.input(ALIGNMENT_IDX, self._alignment_idx.bound[: shape.num_aligned])
            binding.input(ALIGNMENT_SOURCES, self._alignment_sources.bound[: shape.num_aligned])
        for name, array in named_outputs(self._block.decode_outputs(M, shape.num_top)).items():
            binding.output(name, array)
        return binding
