"""Plain draws: tokens chosen from the likeliest ones, of which nothing else is asked; columns."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.requests.request import SamplingParams
from engine.sampling.beam_candidates import num_columns as num_beam_columns
from engine.sampling.logit_controls import is_controlled
from engine.sampling.logits import Floats
from engine.sampling.random_stream import RandomStream, SequenceDraws
from engine.sampling.top_k import MAX_COLUMNS
from engine.sampling.truncation import Truncations

Rows = slice | NDArray[np.intp]

_NUM_TOP_OF_NUCLEUS = 128  # top_p and min_p: more tokens than most distributions need
_MOST_TEMPERATURE = 100  # top_p of all tokens: graphs do not find its end exactly beyond this


class SamplingGraph(IntEnum):
    """The graphs for draws, by the tokens that they look at: more than needed draw the same."""

    COLUMNS = 0  # the likeliest tokens
    ROW = 1  # all tokens, each by itself
    NUCLEUS = 2  # and how much all of them weigh together


class Scope(IntEnum):
    """The work of a draw beyond the likeliest tokens that it begins with."""

    NOTHING = 0
    WEIGH = 1  # its top_p is a share of the weight of all tokens
    GO_ON = 2  # and it goes on behind them, if tokens there may be drawn


class SampledColumns(NamedTuple):
    """The plain draws that are not greedy, an entry each; the same as long as their sequences."""

    which: NDArray[np.intp]  # places among all plain draws
    params: Sequence[SamplingParams]
    draws: Sequence[SequenceDraws]
    how: Truncations
    scopes: NDArray[np.int64]
    needs_total: Sequence[int]  # those that look at the weights of all tokens
    kind: SamplingGraph  # the furthest of them

    @classmethod
    def of(
        cls,
        which: Sequence[int],
        params: Sequence[SamplingParams],
        draws: Sequence[SequenceDraws],
        vocab_size: int,
    ) -> SampledColumns:
        """Return the columns of these draws, all of which are plain."""
        widths = [first_columns(one, vocab_size) for one in params]
        of_all = [i for i, one in enumerate(params) if one.top_k == 0 and one.top_p < 1]
        scopes = []
        for one in params:
            width = num_columns(one)
            if one.top_k == 0 and (width is None or width < vocab_size):
                scopes.append(Scope.GO_ON)
            else:
                is_share = one.top_k == 0 and one.top_p < 1
                scopes.append(Scope.WEIGH if is_share else Scope.NOTHING)
        kind = SamplingGraph.ROW if any(scopes) else SamplingGraph.COLUMNS
        if of_all:
            kind = SamplingGraph.NUCLEUS
        return cls(
            np.array(which, np.intp),
            params,
            draws,
            Truncations.of(params, widths),
            np.array(scopes, np.int64),
            of_all,
            kind,
        )


class SamplingInputs(NamedTuple):
    """The inputs of a graph for draws, an entry a draw."""

    rows: NDArray[np.intp]  # that decode
    how: Truncations
    uniform: NDArray[np.float64]
    scopes: NDArray[np.int64]
    kind: SamplingGraph  # which graph it is


class SamplingBatch(NamedTuple):
    """Tokens to be chosen, an entry a sequence."""

    rows: Rows  # logits
    sampled: SampledColumns | None = None
    positions: Sequence[int] = ()  # each sampled token's, counted from the start of its sequence

    def rows_of(self, which: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the rows of some of the draws."""
        return which if isinstance(self.rows, slice) else self.rows[which]

    def for_graph(self, stream: RandomStream) -> SamplingInputs | None:
        """Return the inputs of a graph for the sampled tokens; None: there are none."""
        sampled = self.sampled
        if sampled is None:
            return None
        uniform = np.array(stream.uniforms(sampled.draws, self.positions))
        rows = self.rows_of(sampled.which)
        return SamplingInputs(rows, sampled.how, uniform, sampled.scopes, sampled.kind)


class PlainChoices(NamedTuple):
    """The chosen tokens, an entry a draw."""

    token_ids: list[int] = []  # noqa: RUF012  # filled where it was made of lists
    logprobs: list[float] = []  # noqa: RUF012  # in the model's own distribution
    failed: Sequence[int] = ()  # draws behind a row that is not finite; what they have is nothing

    def put(
        self,
        which: NDArray[np.intp],
        ids: NDArray[np.int64],
        logprobs: Floats | NDArray[np.float64],
    ) -> None:
        """Let these be what some of the draws have."""
        for i, token_id, logprob in zip(
            which.tolist(), ids.tolist(), logprobs.tolist(), strict=True
        ):
            self.token_ids[i], self.logprobs[i] = token_id, logprob


def num_columns(params: SamplingParams) -> int | None:
    """Return from how many of the likeliest tokens one can be chosen; None: from all.

    This is a first guess if there are controls; the whole row may be needed.
    """
    if params.strategy == "greedy":
        return 1
    if params.strategy == "beam":
        return num_beam_columns(params)
    if params.typical_p < 1 or params.top_k > MAX_COLUMNS:
        return None
    if params.top_k > 0:
        return params.top_k
    is_cut = params.top_p < 1 or params.min_p > 0
    return _NUM_TOP_OF_NUCLEUS if is_cut and not is_controlled(params) else None


def first_columns(params: SamplingParams, vocab_size: int) -> int:
    """Return with how many of the likeliest tokens a plain draw begins."""
    return min(num_columns(params) or 1, vocab_size)


def needs_row_sum(params: SamplingParams) -> bool:
    """Say whether the weights of all tokens have to be added up: the model has only its own sum."""
    return params.top_k == 0 and params.top_p < 1 and params.temperature != 1


def is_plain(params: SamplingParams) -> bool:
    """Say whether the draws of a request are plain, if no single token is banned or forced."""
    if params.strategy == "beam" or params.logprobs is not None or params.alignment:
        return False
    if is_controlled(params):
        return False
    if params.strategy == "greedy":
        return True
    if params.top_k == 0 and params.top_p < 1 and params.temperature > _MOST_TEMPERATURE:
        return False
    return params.typical_p == 1 and params.top_k <= MAX_COLUMNS
