"""What a caller asks of a generating engine, and what comes back: the dataclasses at its border."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    DEADLINE = "deadline"  # only with allow_partial


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
    allow_partial: bool = False  # at the deadline, finish with what there is
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
    max_beam_width: int = 16
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_string_chars: int = 256
    max_stop_token_ids: int = 64
    max_inputs: int = 64


def check_sampling_params(
    params: SamplingParams, *, limits: RequestLimits, vocab_size: int
) -> list[FieldViolation]:
    """Return one violation for every impossible field of `params`, named by its protocol path."""
    checks = (
        *_check_sampling(params, vocab_size),
        *_check_lengths(params, limits),
        *_check_stops(params, limits, vocab_size),
    )
    return [
        FieldViolation(path, description) for is_good, path, description in checks if not is_good
    ]


_Check = tuple[bool, str, str]  # whether the field is good, its path, what is wrong if it is not


def _check_sampling(p: SamplingParams, vocab_size: int) -> Iterator[_Check]:
    path = "decoding.sampling"
    yield (
        math.isfinite(p.temperature) and p.temperature > 0,
        f"{path}.temperature",
        f"{p.temperature:g} is not above 0 and finite; for the most likely token ask for greedy",
    )
    yield (
        0 <= p.top_k <= vocab_size,
        f"{path}.top_k",
        f"{p.top_k} is outside 0 to {vocab_size}, the vocabulary; 0 means all",
    )
    yield 0 < p.top_p <= 1, f"{path}.top_p", f"{p.top_p:g} is outside (0, 1]; 1 means all"
    yield 0 <= p.min_p < 1, f"{path}.min_p", f"{p.min_p:g} is outside [0, 1); 0 means all"
    yield (
        p.seed is None or 0 <= p.seed < 2**64,
        f"{path}.seed",
        f"{p.seed} is no unsigned 64-bit number",
    )


def _check_lengths(p: SamplingParams, limits: RequestLimits) -> Iterator[_Check]:
    yield (
        1 <= p.num_outputs <= limits.max_num_outputs,
        "decoding.num_outputs",
        f"{p.num_outputs} is outside 1 to {limits.max_num_outputs}",
    )
    yield (
        p.num_outputs == 1 or p.strategy == "sampling",
        "decoding.num_outputs",
        f"{p.num_outputs} outputs of greedy search would all be equal; ask for sampling, or for 1",
    )
    yield (
        p.max_new_tokens is None or p.max_new_tokens >= 1,
        "stopping.max_new_tokens",
        f"{p.max_new_tokens} is below 1; leave it out for the model's limit",
    )
    yield (
        0 <= p.min_new_tokens <= (p.max_new_tokens or p.min_new_tokens),
        "stopping.min_new_tokens",
        f"{p.min_new_tokens} is outside 0 to max_new_tokens ({p.max_new_tokens})",
    )


def _check_stops(p: SamplingParams, limits: RequestLimits, vocab_size: int) -> Iterator[_Check]:
    yield (
        len(p.stop_strings) <= limits.max_stop_strings,
        "stopping.strings",
        f"{len(p.stop_strings)} stop strings are more than {limits.max_stop_strings}",
    )
    for i, stop in enumerate(p.stop_strings[: limits.max_stop_strings]):
        yield (
            1 <= len(stop) <= limits.max_stop_string_chars,
            f"stopping.strings[{i}]",
            f"{len(stop)} characters are outside 1 to {limits.max_stop_string_chars}",
        )
    yield (
        len(p.stop_token_ids) <= limits.max_stop_token_ids,
        "stopping.token_ids",
        f"{len(p.stop_token_ids)} stop tokens are more than {limits.max_stop_token_ids}",
    )
    for i, token_id in enumerate(p.stop_token_ids[: limits.max_stop_token_ids]):
        yield (
            0 <= token_id < vocab_size,
            f"stopping.token_ids[{i}]",
            f"{token_id} is outside the vocabulary, 0 to {vocab_size - 1}",
        )


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


GenerationEvent = Admitted | TextDelta | SequenceFinished | RequestFinished


@dataclass(frozen=True)
class LoadSnapshot:
    """How busy an engine is now, for routers and autoscalers."""

    running: int  # sequences in the running batch
    waiting: int  # requests
    waiting_tokens: int
    cache_used: float  # share of the slots, 0 to 1
    tokens_per_second: float
