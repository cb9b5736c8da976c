"""Tokens and candidates to be chosen from the logits of a step, and the choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine.requests.events import PositionLogprobs
from engine.requests.request import SamplingParams

if TYPE_CHECKING:
    from engine.text.constraint import ConstraintMatcher  # loads llguidance


class Draw(NamedTuple):
    """A token to be chosen."""

    logits_row: int  # several sequences of a request draw their first token from the same row
    params: SamplingParams
    seed: int
    sequence_index: int  # in its request
    position: int  # the token's, counted from the start of the sequence
    banned: tuple[int, ...]  # tokens that may not be chosen
    tokens: Sequence[int] = ()  # the sequence so far, the prompt (or start token) included
    num_prompt: int = 0  # how many of them were given
    matcher: ConstraintMatcher | None = None  # the request's constraint
    forced: int | None = None  # the token that must be chosen


class BeamExpansion(NamedTuple):
    """The best continuations of all hypotheses of one beam search."""

    beams: tuple[Draw, ...]  # one a running hypothesis
    scores: tuple[float, ...]  # the hypotheses' sums of log-probabilities so far
    num_candidates: int


class TokensToScore(NamedTuple):
    """Given tokens whose log-probabilities are wanted."""

    logits_row: int  # the first token's; the others follow
    token_ids: tuple[int, ...]
    num_top: int  # alternatives


class Sampled(NamedTuple):
    """A chosen token and its log-probability in the model's own distribution."""

    token_id: int
    logprob: float
    position: PositionLogprobs | None = None  # if the request asks for log-probabilities


class Candidate(NamedTuple):
    """A continuation of a hypothesis."""

    beam: int  # which of the BeamExpansion's
    token_id: int
    score: float  # the hypothesis with this token, after controls
    logprob: float  # the token in the model's own distribution
    position: PositionLogprobs | None = None


Choice = Sampled | tuple[Candidate, ...] | None  # for a draw; None: nothing can be chosen
