"""What one step of the engine computes, as the scheduler hands it to the model runner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.requests.events import PositionLogprobs
from engine.requests.request import SamplingParams
from engine.sampling.lazy_rows import LazyRows

Floats = NDArray[np.float32]


class RowOp(NamedTuple):
    """A change of the cache's rows; an empty row has length 0.

    `cut` shortens `target`, and a little behind it may stay in memory; `clear` puts zeros there,
    for a row that may hold NaN. `move` takes `source` to the empty row `target` and clears
    `source`; `copy` leaves it as it is, and what was in `target` is gone; `swap` exchanges the two.
    `cut_source`, `clear_source` and `copy_source` do the same with rows of the sources.
    """

    kind: Literal[
        "cut", "clear", "move", "copy", "swap", "cut_source", "clear_source", "copy_source"
    ]
    source: int
    target: int
    start: int = 0  # copy: positions before it are equal in both already; cut, clear: they stay
    stop: int | None = None  # copy: the first position that is not wanted; None: all are


class Encode(NamedTuple):
    """A source sentence to be encoded into a row of the sources."""

    row: int
    source_ids: tuple[int, ...]


class PrefillChunk(NamedTuple):
    """The next tokens of a prompt."""

    row: int
    token_ids: tuple[int, ...]
    num_logits: int  # its last positions whose logits are wanted
    source_row: int = 0  # encoder-decoder: of the sources


class Draw(NamedTuple):
    """A token to be chosen."""

    logits_row: int  # several sequences of a request draw their first token from the same row
    params: SamplingParams
    seed: int
    sequence_index: int  # in its request
    position: int  # of the token, counted from the start of the sequence
    banned: tuple[int, ...]  # tokens that may not be chosen
    tokens: Sequence[int] = ()  # the sequence so far, the prompt (or start token) included
    num_prompt: int = 0  # of them, tokens that were given
    matcher: TokenMatcher | None = None  # of the request's constraint


class BeamDraw(NamedTuple):
    """The best continuations of all hypotheses of one beam search."""

    beams: tuple[Draw, ...]  # one a running hypothesis
    scores: tuple[float, ...]  # of the hypotheses so far: sums of log-probabilities
    num_candidates: int


class ScoreDraw(NamedTuple):
    """Given tokens whose log-probabilities are wanted."""

    logits_row: int  # of the first of them; the others follow
    token_ids: tuple[int, ...]
    num_top: int  # alternatives


class Sampled(NamedTuple):
    """A chosen token and its log-probability in the model's own distribution."""

    token_id: int
    logprob: float
    position: PositionLogprobs | None = None  # if the request asks for log-probabilities


class Candidate(NamedTuple):
    """A continuation of a hypothesis."""

    beam: int  # which of the BeamDraw's
    token_id: int
    score: float  # of the hypothesis with this token, after controls
    logprob: float  # of the token in the model's own distribution
    position: PositionLogprobs | None = None


class StepLogits(NamedTuple):
    """What the model gives for the rows of a step; the arrays are overwritten by the next step.

    The top tokens are those of the k largest logits, best first, the lower id first among equals.
    """

    logits: Floats | LazyRows  # [N, vocab_size]
    top_ids: NDArray[np.int64]  # [N, k]
    top_logits: Floats  # [N, k]
    top_logprobs: Floats  # [N, k]: log-softmax over the whole vocabulary
    alignment: Floats | None = None  # [rows of ScheduledBatch.aligned, longest source], if any

    @property
    def all_logits(self) -> Floats:
        """The logits of all rows as an array."""
        return np.asarray(self.logits)

    def fetch(self, rows: Iterable[int]) -> None:
        """Bring the logits of rows that will be read to the host, if they are not there."""
        if isinstance(self.logits, LazyRows):
            self.logits.fetch(rows)


class TokenMatcher(Protocol):
    """Follows one sequence through a constraint."""

    @property
    def error(self) -> str | None:
        """Why it cannot be followed any further; then no token is allowed."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, [vocab_size]."""

    def advance(self, token_id: int) -> None:
        """Take in a token that was chosen."""

    def fork(self) -> TokenMatcher:
        """Return a copy that goes its own way."""


@dataclass(frozen=True)
class ScheduledBatch:
    """One step. The parts are run in the order of the fields.

    Logits come in another order: a row for each decoding one, then those that each chunk wants.
    """

    row_ops: tuple[RowOp, ...]
    encodes: tuple[Encode, ...]
    chunks: tuple[PrefillChunk, ...]
    decode_ids: tuple[int, ...]  # the token of row 0, 1, ...
    draws: tuple[Draw | BeamDraw, ...]
    decode_sources: tuple[int, ...] = ()  # encoder-decoder: the source of row 0, 1, ...
    scores: tuple[ScoreDraw, ...] = ()
    num_top: int = 1  # of the largest logits, as many as the draws need at most
    aligned: tuple[int, ...] = ()  # rows of logits whose attention to the source is wanted, rising

    @property
    def is_empty(self) -> bool:
        """Whether no model is run."""
        return not (self.encodes or self.decode_ids or self.chunks)
