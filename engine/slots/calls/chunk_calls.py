"""Plans the calls that compute the next tokens of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

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
from engine.session import Binding
from engine.slots.batch import PrefillChunk
from engine.slots.calls.decoder_graph import DecoderGraph
from engine.slots.calls.graph_call import GraphCall, named_outputs
from engine.slots.step_block import StepBlock

_MAX_BINDINGS = 256


class ChunkCalls:
    """Appends the tokens of a chunk to its row: a call a chunk."""

    def __init__(self, graph: DecoderGraph, block: StepBlock) -> None:
        self._graph = graph
        self._block = block
        self._first_row = block.persistent_input(BEAM_ROWS, (1, 1))  # one source with one row
        self._nothing = block.persistent_input(ALIGNMENT_IDX, (0,))
        self._bindings: dict[tuple[int, int, bool], Binding] = {}

    def plan(
        self, chunks: Sequence[PrefillChunk], num_top: int, first_row: int, aligned: Sequence[int]
    ) -> Iterator[GraphCall]:
        """Give the calls of a step, counting their tokens as computed.

        The logits that chunks want are the step's from row `first_row` on. The attention of its
        rows in `aligned` is wanted.
        """
        first = 0
        for chunk in chunks:
            last = first + chunk.num_logits
            inside = [i for i, row in enumerate(aligned) if first <= row - first_row < last]
            rows = [aligned[i] - first_row - first for i in inside]
            yield self._call(chunk, first, num_top, rows, inside[0] if inside else 0)
            first = last

    def _call(
        self,
        chunk: PrefillChunk,
        first: int,
        num_top: int,
        aligned: Sequence[int],
        aligned_into: int,
    ) -> GraphCall:
        """Plan a chunk; `aligned` counts from its first wanted position."""
        cache, block = self._graph.cache, self._block
        S, start = len(chunk.token_ids), int(cache.lengths[chunk.row])
        count = max(1, chunk.num_logits)  # the graph wants one
        inputs: dict[str, Bound] = {
            INPUT_IDS: block.add(INPUT_IDS, [chunk.token_ids]),  # (1, S)
            POSITION_IDS: block.add(POSITION_IDS, np.arange(start, start + S)[None]),
            LOGIT_IDX: block.add(LOGIT_IDX, np.arange(S - count, S)),
            SEQLENS_K: block.add(SEQLENS_K, [start + S - 1]),
            NUM_TOP: self._graph.num_top(num_top),
        }
        if cache.cross_layers:
            length = cache.source_lengths[chunk.source_row : chunk.source_row + 1]
            inputs[SOURCE_LENGTHS] = block.add(SOURCE_LENGTHS, length)
            inputs[ROW_QUERIES] = block.add(ROW_QUERIES, np.arange(S)[None])
        outputs = named_outputs(block.chunk_outputs(first, first + count))
        if aligned:
            positions = [row + S - count for row in aligned]
            inputs[ALIGNMENT_IDX] = block.add(ALIGNMENT_IDX, positions)
            inputs[ALIGNMENT_SOURCES] = block.add(ALIGNMENT_SOURCES, [0] * len(aligned))
            outputs[ALIGNMENT] = block.alignment(aligned_into, aligned_into + len(aligned))
        cache.lengths[chunk.row] += S
        binding = self._binding(chunk, is_aligned=len(aligned) > 0)
        return GraphCall(binding, inputs, outputs, self._graph.total_of(start + S))

    def _binding(self, chunk: PrefillChunk, *, is_aligned: bool) -> Binding:
        key = (chunk.row, chunk.source_row, is_aligned)  # an output cannot be unbound
        if key not in self._bindings:
            if len(self._bindings) >= _MAX_BINDINGS:
                self._bindings.clear()
            binding = self._bindings[key] = self._graph.bind(chunk.row, chunk.row + 1)
            if self._graph.cache.cross_layers:
                self._graph.bind_sources(binding, chunk.source_row, chunk.source_row + 1)
                binding.input(BEAM_ROWS, self._first_row.bound)
            if self._graph.contract.alignment and not is_aligned:
                binding.input(ALIGNMENT_IDX, self._nothing.bound)
                binding.input(ALIGNMENT_SOURCES, self._nothing.bound)
        return self._bindings[key]
