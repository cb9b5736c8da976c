"""Outputs of a step, as the engine's thread hands them to the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import TokenweirError
from engine.requests.events import FinishReason, PositionLogprobs, Timing
from engine.sampling.beam_search import Hypothesis


@dataclass(frozen=True, slots=True)
class AdmittedOutput:
    """A request runs."""

    key: int


@dataclass(slots=True)  # frozen it would take five times as long to make
class TokensOutput:
    """The next tokens of a sequence, the last ones if there is a reason."""

    key: int
    index: int
    token_ids: Sequence[int]
    sum_logprob: float  # over all tokens so far
    # An end by tokens goes before a stop string here; the maker of the text may turn it round.
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    positions: Sequence[PositionLogprobs] = ()  # if asked for, one a token
    attention: Sequence[tuple[float, ...]] = ()  # to the source, if asked for, one a token

    def __reduce__(self) -> tuple[object, ...]:
        """Let it cross to another process in a third of the time that its slots would take."""
        return TokensOutput, (
            self.key,
            self.index,
            self.token_ids,
            self.sum_logprob,
            self.finish_reason,
            self.matched_stop,
            self.positions,
            self.attention,
        )


@dataclass(frozen=True, slots=True)
class HypothesisOutput:
    """One of the sequences that beam search returns, whole."""

    key: int
    index: int  # 0: the best
    hypothesis: Hypothesis
    alignment: tuple[tuple[float, ...], ...] = ()  # [generated, source], if asked for


@dataclass(frozen=True, slots=True)
class ScoresOutput:
    """Log-probabilities of the next given tokens of a prompt or target."""

    key: int
    positions: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class CutOutput:
    """A sequence has ended without a further token: its request may go on no longer."""

    key: int
    index: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """All sequences of a request have ended."""

    key: int
    timing: Timing
    discarded_tokens: int = 0  # computed for hypotheses that are not returned
    cached_tokens: int = 0  # input tokens that were not computed again


@dataclass(frozen=True, slots=True)
class FailedOutput:
    """A request has ended without a result."""

    key: int
    error: TokenweirError


EngineOutput = (
    AdmittedOutput
    | TokensOutput
    | CutOutput
    | HypothesisOutput
    | ScoresOutput
    | FinishedOutput
    | FailedOutput
)
