"""Keeps the hypotheses of one beam search: those that run, those that have ended, the best."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.requests.events import FinishReason, PositionLogprobs
from engine.requests.request import LengthPenaltyForm, SamplingParams
from engine.sampling.draws import Candidate
from engine.sampling.stop_rule import End, StopRule
from engine.text.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The hypotheses that run behind a step, best first; none if the search is over."""

    parents: tuple[int, ...]  # for each hypothesis, the one of the step before that it continues
    tokens: tuple[int, ...]  # its new token
    num_finished: int  # hypotheses that ended in this step


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence that beam search found."""

    token_ids: tuple[int, ...]  # generated, the one that ended it included
    beams: tuple[int, ...]  # which running hypothesis each of these tokens was a candidate of
    score: float  # length-penalised
    sum_logprob: float  # in the model's own distribution
    reason: FinishReason
    matched_stop: str | int | None
    logprobs: tuple[PositionLogprobs, ...]  # if asked for


_EXPONENTS: Mapping[LengthPenaltyForm, float] = {"power": 1.0, "paper": 0.6}  # if none is given


class BeamSearch:
    """Beam search of Vaswani et al. 2017, section 6.1, with either length penalty.

    A hypothesis of n generated tokens, its end token counted, scores the sum of its
    log-probabilities over n ** length_penalty, as in Hugging Face `generate`, or, in the form of
    the paper, over ((5 + n) / 6) ** length_penalty, as in Wu et al. 2016; the latter with 0.6 if
    neither exponent nor form is asked for. An ending candidate counts if it is among the best
    `beam_width` of its step, and those that do not end fill the running hypotheses: both as in
    `generate`. Every candidate ends at `max_new_tokens`. The earlier of equal scores comes first.

    A stop string ends a hypothesis with the token that completes it. Any token may: if more
    candidates end than `num_candidates` allows for, fewer hypotheses go on, as in `generate`.

    The search with `beam_end` "bound" is over when `num_outputs` finished hypotheses score at least
    what any running one can still reach. Sums only fall, so that is the sum of now at the most
    favourable length left, and going on to `max_new_tokens` would return the same. Nothing bounds a
    sum that controls can make rise, and then the search does go on. The results are those of
    `generate` with `early_stopping="never"`. The search with "enough", its True, is over as soon as
    `beam_width` hypotheses have finished; with "estimate", its False, as soon as each of so many
    scores at least what the best running one does now. Both may miss the best.
    """

    def __init__(
        self,
        params: SamplingParams,
        stop_rule: StopRule,
        text: Detokenizer | None = None,
    ) -> None:
        """`stop_rule` is the request's and allows at least one token.

        `text` finds the stop strings, behind the given tokens; None if there are none to find.
        """
        self._params = params
        self._stop_rule = stop_rule
        controls = params.controls
        may_rise = controls.frequency_penalty < 0 or controls.presence_penalty < 0
        may_rise |= any(bias > 0 for _, bias in controls.logit_bias)
        self._is_bounded = params.beam_end == "bound" and not may_rise
        exponent = params.length_penalty
        self._form = params.length_penalty_form or ("paper" if exponent is None else "power")
        self._exponent = _EXPONENTS[self._form] if exponent is None else exponent
        self._num_steps = 0
        self._running: list[_Beam | None] = [None]  # best first; None has no token yet
        self._texts = [text]  # one a running hypothesis
        self._ended: list[_Ended] = []  # best first
        self._num_chosen = 0  # tokens of hypotheses, a shared one counted once

    @property
    def scores(self) -> tuple[float, ...]:
        """The running hypotheses' sums of log-probabilities; before the first step that is one."""
        return tuple(beam.last.score if beam else 0.0 for beam in self._running)

    @property
    def num_candidates(self) -> int:
        """Candidates to give to a step: enough to fill the beams beside all end tokens."""
        num_ends = len(self._stop_rule.token_ids)
        return self._params.beam_width * (1 + max(1, num_ends))

    @property
    def is_done(self) -> bool:
        """Whether no hypothesis runs any more."""
        return not self._running

    @property
    def num_discarded(self) -> int:
        """Tokens chosen so far that are in none of the `hypotheses`."""
        kept = {id(beam) for ended in self._best() for beam in _path(ended.beam)}
        return self._num_chosen - len(kept)

    def advance(self, candidates: Sequence[Candidate]) -> BeamStep:
        """Continue the running hypotheses with the best of `candidates`, which are best first.

        A score of minus infinity marks one that is not allowed. There may be fewer than
        `num_candidates`, and so fewer hypotheses.
        """
        assert self._running, "the search is over"
        self._num_steps += 1
        running: list[_Beam | None] = []
        texts: list[Detokenizer | None] = []
        num_finished = 0
        for rank, candidate in enumerate(candidates):
            if len(running) == self._params.beam_width or candidate.score == -math.inf:
                break
            before = self._texts[candidate.beam]
            text = before.fork() if before else None
            end = self._stop_rule.end_of(candidate.token_id, self._num_steps, text)
            if end is None:
                running.append(self._extend(candidate))
                texts.append(text)
            elif rank < self._params.beam_width:
                self._finish(self._extend(candidate), end)
                num_finished += 1
        self._running = [] if self._is_decided(running) else running
        self._texts = texts
        self._num_chosen += num_finished + len(self._running)
        last = [beam.last for beam in self._running if beam]
        return BeamStep(
            tuple(candidate.beam for candidate in last),
            tuple(candidate.token_id for candidate in last),
            num_finished,
        )

    def close(self, reason: FinishReason) -> None:
        """End the search before its time: the best that run make up what `num_outputs` lacks."""
        missing = max(0, self._params.num_outputs - len(self._ended))
        for beam in self._running[:missing]:
            self._finish(beam, End(reason))
        self._running = []

    def hypotheses(self) -> list[Hypothesis]:
        """Return `num_outputs` hypotheses, best first.

        There are fewer if fewer ended: with few candidates, or a `beam_width` below `num_outputs`.
        """
        found = []
        for ended in self._best():
            path = [beam.last for beam in _path(ended.beam)][::-1]
            hypothesis = Hypothesis(
                token_ids=tuple(candidate.token_id for candidate in path),
                beams=tuple(candidate.beam for candidate in path),
                score=ended.score,
                sum_logprob=ended.beam.sum_logprob if ended.beam else 0.0,
                reason=ended.end.reason,
                matched_stop=ended.end.stop,
                logprobs=tuple(c.position for c in path if c.position is not None),
            )
            found.append(hypothesis)
        return found

    def _best(self) -> list[_Ended]:
        return self._ended[: self._params.num_outputs]

    def _extend(self, candidate: Candidate) -> _Beam:
        parent = self._running[candidate.beam]
        before = parent.sum_logprob if parent else 0.0
        return _Beam(candidate, parent, before + candidate.logprob)

    def _finish(self, beam: _Beam | None, end: End) -> None:
        total = beam.last.score if beam else 0.0
        ended = _Ended(total / self._penalty(self._num_steps), beam, end)
        insort(self._ended, ended, key=lambda other: -other.score)  # behind its equals
        del self._ended[self._params.beam_width :]

    def _is_decided(self, running: Sequence[_Beam | None]) -> bool:
        if not running:
            return False
        if self._is_bounded:
            return self._ended_score_at_least(
                running,
                self._params.num_outputs,
                (self._num_steps + 1, self._stop_rule.max_new_tokens),
            )
        match self._params.beam_end:
            case "estimate":
                width = self._params.beam_width
                return self._ended_score_at_least(running, width, (self._num_steps,))
            case "enough":
                return len(self._ended) >= self._params.beam_width
            case _:
                return False

    def _ended_score_at_least(
        self, running: Sequence[_Beam | None], count: int, lengths: tuple[int, ...]
    ) -> bool:
        """Say whether so many have ended better than the best that runs would at any length."""
        if len(self._ended) < count:
            return False
        best = max(beam.last.score for beam in running if beam)
        # Monotonic in the length: rising for a positive exponent, falling for a negative one.
        return self._ended[count - 1].score >= best / max(map(self._penalty, lengths))

    def _penalty(self, num_tokens: int) -> float:
        if self._form == "power":
            return math.pow(max(1, num_tokens), self._exponent)
        return math.pow((5 + num_tokens) / 6, self._exponent)  # Wu et al., equation 14


@dataclass(frozen=True, slots=True, eq=False)
class _Beam:
    """A hypothesis, as its last token; those before are shared with its siblings."""

    last: Candidate
    parent: _Beam | None
    sum_logprob: float


class _Ended(NamedTuple):
    score: float
    beam: _Beam | None
    end: End


def _path(beam: _Beam | None) -> Iterator[_Beam]:
    """Give the tokens of a hypothesis, the last one first."""
    while beam:
        yield beam
        beam = beam.parent
