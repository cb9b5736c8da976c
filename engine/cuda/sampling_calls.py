"""Plans the call that draws the next tokens of rows behind the decode call of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from engine.package.graph_io import (
    DRAWN,
    LAST_COLUMN,
    LEAST_SCORE,
    LOGITS,
    SCOPE,
    TEMPERATURE,
    TOP_P,
    TOPS,
    UNIFORM,
    check_graphs,
    sampling_shapes,
)
from engine.sampling.plain import SamplingGraph, SamplingInputs
from engine.sampling.truncation import SMALLEST_NORMAL
from engine.session import NOT_CAPTURED, Binding, Session
from engine.slots.calls.graph_call import GraphCall
from engine.slots.runner import MakeSamplingCalls
from engine.slots.step_block import StepBlock


def sampling_calls_of(graphs: Sequence[Session], vocab_size: int) -> MakeSamplingCalls | None:
    """Return what plans calls of these graphs, by SamplingGraph; None: there are none.

    Raises PackageError if they are not graphs for draws from so many tokens.
    """
    if not graphs:
        return None
    check_graphs(*zip(graphs, sampling_shapes(vocab_size), strict=True))
    return partial(SamplingCalls, graphs)


class _Shape(NamedTuple):
    """All that a binding of a call depends on."""

    kind: SamplingGraph
    num_rows: int
    num_top: int


class SamplingCalls:
    """Draws a token for each row of a decode call, the likeliest one where nothing else is said."""

    def __init__(
        self,
        graphs: Sequence[Session],
        block: StepBlock,
        num_slots: int,
        graph_ids: Iterator[int] | None,
    ) -> None:
        """`graphs` are by SamplingGraph; `graph_ids` those of captured calls, None: none is."""
        self._graphs = graphs
        self._block = block
        self._graph_ids = graph_ids
        names = (LAST_COLUMN, TEMPERATURE, TOP_P, LEAST_SCORE, UNIFORM, SCOPE)
        self._asked = {name: block.persistent_input(name, (num_slots, 1)) for name in names}
        self._asked[TEMPERATURE].host[:] = 1
        self._asked[TOP_P].host[:] = np.inf
        self._asked[LEAST_SCORE].host[:] = -np.inf
        self._bindings: dict[_Shape, tuple[Binding, int]] = {}

    def plan(self, draws: SamplingInputs, num_rows: int, num_top: int) -> GraphCall:
        """Return the call behind a decode call of so many rows with their likeliest tokens."""
        how, asked = draws.how, {name: place.host for name, place in self._asked.items()}
        asked[LAST_COLUMN][:] = 0  # rows without a draw here
        asked[LAST_COLUMN][draws.rows, 0] = how.num_columns - 1
        asked[TEMPERATURE][draws.rows] = np.maximum(how.temperature, SMALLEST_NORMAL)
        asked[TOP_P][draws.rows, 0] = how.top_p
        asked[LEAST_SCORE][draws.rows] = how.least
        asked[UNIFORM][draws.rows, 0] = draws.uniform
        asked[SCOPE][:] = 0
        asked[SCOPE][draws.rows, 0] = draws.scopes
        binding, graph_id = self._bound(_Shape(draws.kind, num_rows, num_top))
        return GraphCall(binding, {}, {}, graph_id=graph_id)

    def _bound(self, shape: _Shape) -> tuple[Binding, int]:
        if shape not in self._bindings:
            graph_id = NOT_CAPTURED if self._graph_ids is None else next(self._graph_ids)
            self._bindings[shape] = self._bind(shape), graph_id
        return self._bindings[shape]

    def _bind(self, shape: _Shape) -> Binding:
        kind, M, k = shape
        graph = self._graphs[kind]
        binding = graph.bind()
        logits, *top = self._block.decode_outputs(M, k)
        given = {name: place.bound[:M] for name, place in self._asked.items()}
        given |= {LOGITS: logits, **dict(zip(TOPS, top, strict=True))}
        for name in graph.inputs:
            binding.input(name, given[name])
        for name, array in zip(DRAWN, self._block.drawn_outputs(M, k), strict=True):
            binding.output(name, array)
        return binding
