"""What a caller asks of a generating engine, and what comes back: the dataclasses at its border."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from engine.errors import FieldViolation, InvalidRequest

Strategy = Literal["greedy", "sampling", "beam"]
ConstraintKind = Literal["json_schema", "regex", "grammar", "choice"]


class FinishReason(Enum):
    """Why a sequence ended; the names are the protocol's."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    DRAINED = "drained"  # only with allow_partial, as is the next
    DEADLINE = "deadline"


@dataclass(frozen=True)
class LogitControls:
    """Adjustments of the logits, applied in the order of the fields."""

    repetition_penalty: float = 1.0  # above 0; of tokens in prompt or output; 1: none
    frequency_penalty: float = 0.0  # -2 to 2; per occurrence in the output; 0: none
    presence_penalty: float = 0.0  # -2 to 2; of tokens in the output; 0: none
    no_repeat_ngram: int = 0  # no n-gram of this size twice; 0: none
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added to its logit
    banned_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Constraint:
    """What the output's text must match."""

    kind: ConstraintKind
    values: tuple[str, ...]  # the schema, expression or grammar; several for choice


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, when a sequence stops, and what is returned of it."""

    strategy: Strategy = "greedy"
    temperature: float = 1.0  # above 0
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # in (0, 1]; 1: all
    min_p: float = 0.0  # in [0, 1); 0: all
    typical_p: float = 1.0  # in (0, 1]; 1: all
    seed: int | None = None  # None: the engine draws one and reports it
    best_of: int | None = None  # sampled, of which num_outputs are returned; None: num_outputs
    beam_width: int = 1  # hypotheses kept by beam search
    length_penalty: float = 0.6  # alpha of ((5 + n) / 6) ** alpha, beam search
    early_stop: bool = True  # end when no open hypothesis can win, beam search
    num_outputs: int = 1  # sequences returned for one prompt
    controls: LogitControls = LogitControls()
    constraint: Constraint | None = None
    logprobs: int | None = None  # alternatives a token; 0: the chosen one's only; None: none
    prompt_logprobs: int | None = None  # the same of the prompt, or the given target prefix
    alignment: bool = False  # return the attention from target to source tokens
    allow_partial: bool = False  # at the deadline or a drain, finish with what there is
    max_new_tokens: int | None = None  # None: until the context is full
    min_new_tokens: int = 0  # no end-of-sequence or stop before this many
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the matched stop in the output
    ignore_eos: bool = False  # go on past end-of-sequence

    @property
    def num_sequences(self) -> int:
        """Sequences that run for one prompt."""
        if self.strategy == "beam":
            return self.beam_width
        return max(self.num_outputs, self.best_of or 0)


@dataclass(frozen=True)
class RequestLimits:
    """The largest values a request may ask for."""

    max_num_outputs: int = 8
    max_best_of: int = 16
    max_beam_width: int = 16
    max_logprobs: int = 20
    max_logit_biases: int = 1024
    max_banned_tokens: int = 1024
    max_constraint_chars: int = 65536  # of all its texts together
    max_choices: int = 256
    max_stop_strings: int = 16
    max_stop_string_chars: int = 256
    max_stop_token_ids: int = 64
    max_inputs: int = 64

    @property
    def most_sequences(self) -> int:
        """The most sequences that may run for one prompt."""
        return max(self.max_num_outputs, self.max_best_of, self.max_beam_width)


def raise_if_any(violations: list[FieldViolation]) -> None:
    """Raise InvalidRequest if there is a violation."""
    if violations:
        raise InvalidRequest(violations)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be continued (decoder) or transduced (encoder-decoder)."""

    request_id: str
    prompt: str | tuple[int, ...]  # text, or token ids used as they are
    params: SamplingParams = field(default_factory=SamplingParams)
    deadline: float | None = None  # on time.monotonic()'s clock
    input_path: str = "inputs[0]"  # where the prompt stands in the protocol's request, for errors
    target_prefix: str | tuple[int, ...] = ()  # the output begins with it
    priority: int = 0  # lower runs earlier
    tenant: str = ""  # among whom the engine is shared fairly


@dataclass(frozen=True)
class ScoreRequest:
    """A target whose log-probability is wanted, behind a source (or a beginning)."""

    request_id: str
    source: str | tuple[int, ...]
    target: str | tuple[int, ...]
    top_logprobs: int = 0  # alternatives a position
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    input_path: str = "inputs[0]"


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


@dataclass(frozen=True)
class Timing:
    """Where the time went, in seconds on the monotonic clock."""

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


@dataclass(frozen=True)
class TextDelta:
    """More of one sequence: whole UTF-8 characters, never retracted."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()  # of the generated ones, if asked for


@dataclass(frozen=True)
class SequenceFinished:
    """The end of one sequence; `text` and `token_ids` are all of it, a given prefix included."""

    index: int
    reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    matched_stop: str | int | None
    sum_logprob: float  # of the generated tokens
    score: float = 0.0  # sequences are ordered by it: beam search and best_of
    logprobs: tuple[PositionLogprobs, ...] = ()  # of the generated tokens, if asked for
    alignment: tuple[tuple[float, ...], ...] = ()  # [generated, source] attention, if asked for
    was_streamed: bool = True  # False: no TextDelta came before (beam search, best_of)


@dataclass(frozen=True)
class Score:
    """What a ScoreRequest gives."""

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
    source_ids: tuple[int, ...] = ()  # the columns of alignment, if asked for


GenerationEvent = Admitted | TextDelta | SequenceFinished | RequestFinished


@dataclass(frozen=True)
class WastedWork:
    """Tokens computed that are in no answer, since the engine was started."""

    padding_tokens: int = 0  # rows that belong to nobody
    cancelled_tokens: int = 0  # of requests whose client went away
    expired_tokens: int = 0  # of requests that failed at their deadline
    failed_tokens: int = 0  # of requests that failed otherwise
    discarded_tokens: int = 0  # of beams, of samples not returned, behind stop strings

    def __add__(self, other: WastedWork) -> WastedWork:
        """Return both together."""
        return WastedWork(
            self.padding_tokens + other.padding_tokens,
            self.cancelled_tokens + other.cancelled_tokens,
            self.expired_tokens + other.expired_tokens,
            self.failed_tokens + other.failed_tokens,
            self.discarded_tokens + other.discarded_tokens,
        )


@dataclass(frozen=True)
class LoadSnapshot:
    """How busy an engine is now, for routers and autoscalers."""

    running: int  # sequences in the running batch
    waiting: int  # requests
    waiting_tokens: int  # the most that the waiting requests may come to cost
    cache_used: float  # share of the slots, 0 to 1
    tokens_per_second: float
    wasted: WastedWork = WastedWork()
