"""Events of a generating engine: the dataclasses that it returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine.requests.request import Reasoning


class FinishReason(Enum):
    """Why a sequence ended; the names are the protocol's."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    DRAINED = "drained"  # only with allow_partial, as is the next
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability in the model's own distribution."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()  # best first


@dataclass(frozen=True)
class Usage:
    """Tokens consumed."""

    input_tokens: int
    output_tokens: int
    cached_input_tokens: int = 0
    discarded_tokens: int = 0
    reasoning_tokens: int = 0  # a part of the output


@dataclass(frozen=True)
class Timing:
    """The phases of a request, in seconds on the monotonic clock."""

    queue: float  # arrival to admission
    prefill: float  # admission to the first token
    decode: float  # first to last token
    time_to_first_token: float  # arrival to first token
    steps: int  # engine steps in which the request took part
    mean_batch_size: float  # sequences that shared those steps, mean


@dataclass(frozen=True)
class Admitted:
    """The request has its place in the batch; sent first, once."""

    request_id: str
    num_input_tokens: int  # as in Usage
    prompt_ids: tuple[int, ...] = ()  # if they are asked for
    reasoning: Reasoning | None = None


@dataclass(slots=True)  # frozen it would take five times as long to make, for every token
class TextDelta:
    """More of one sequence: whole UTF-8 characters, never retracted."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()  # one a generated token, if asked for


@dataclass(frozen=True)
class SequenceFinished:
    """The end of one sequence; `text` and `token_ids` are all of it, a given prefix included."""

    index: int
    reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    matched_stop: str | int | None
    sum_logprob: float  # over the generated tokens
    score: float = 0.0  # sequences are ordered by it: beam search and best_of
    logprobs: tuple[PositionLogprobs, ...] = ()  # one a generated token, if asked for
    alignment: tuple[tuple[float, ...], ...] = ()  # [generated, source] attention, if asked for
    was_streamed: bool = True  # False: no TextDelta came before (beam search, best_of)


@dataclass(frozen=True)
class Score:
    """The result of a ScoreRequest."""

    sum_logprob: float
    positions: tuple[PositionLogprobs, ...]  # one for each target token that has one before it
    usage: Usage
    timing: Timing


@dataclass(frozen=True)
class RequestFinished:
    """The end of a request; sent last, once."""

    request_id: str
    usage: Usage
    timing: Timing
    seed: int  # that was in fact used; 0 where nothing was drawn
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()  # from the second token on, if asked for
    source_ids: tuple[int, ...] = ()  # the prompt's, if it or alignment is asked for
    reasoning: Reasoning | None = None


GenerationEvent = Admitted | TextDelta | SequenceFinished | RequestFinished
