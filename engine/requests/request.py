"""Requests to a generating engine: the dataclasses that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Strategy = Literal["greedy", "sampling", "beam"]
LengthPenaltyForm = Literal["power", "paper"]  # n ** p, ((5 + n) / 6) ** p
# When a beam search ends: as soon as no running hypothesis can win; once `beam_width` have ended
# and none that runs scores more as it is; once `beam_width` have ended; at max_new_tokens.
BeamEnd = Literal["bound", "estimate", "enough", "limit"]
ConstraintKind = Literal["json_schema", "regex", "grammar", "choice"]
# How an answer begins with reasoning: if with "<think>"; at once, since its prompt ends with that.
Reasoning = Literal["marked", "begun"]


@dataclass(frozen=True)
class LogitControls:
    """Adjustments of the logits, applied in the order of the fields."""

    repetition_penalty: float = 1.0  # above 0; of tokens in prompt or output; 1: none
    frequency_penalty: float = 0.0  # -2 to 2; per occurrence in the output; 0: none
    presence_penalty: float = 0.0  # -2 to 2; of tokens in the output; 0: none
    no_repeat_ngram: int = 0  # no n-gram of this size twice; 0: none
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added to its logit
    banned_tokens: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # runs of tokens that may not come
    begin_banned_tokens: tuple[int, ...] = ()  # not the first token that is not forced
    encoder_no_repeat_ngram: int = 0  # no n-gram of this size that the source has; 0: none
    allowed_token_ids: tuple[int, ...] = ()  # no others, an end of the sequence neither; (): all

    @cached_property
    def change_logits(self) -> bool:
        """Whether more is done to logits than to rule single tokens out."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        others = self.no_repeat_ngram or self.logit_bias or self.allowed_token_ids
        return penalties != (1, 0, 0) or bool(others)


@dataclass(frozen=True)
class Constraint:
    """A schema, expression, grammar or list of choices that the output's text must match."""

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
    length_penalty: float | None = None  # exponent of either sign; None: 0.6, or 1 of "power"
    length_penalty_form: LengthPenaltyForm | None = None  # None: "power" if there is an exponent
    beam_end: BeamEnd = "bound"  # when a beam search ends
    renormalize: bool = False  # the tokens that controls leave to a beam search add up to 1 again
    num_outputs: int = 1  # sequences returned for one prompt
    # The first generated tokens. A target prefix takes their place; if it is text, behind them.
    forced_begin: tuple[int, ...] = ()
    forced_end: int | None = None  # the last token that max_new_tokens or the context allows
    controls: LogitControls = LogitControls()
    constraint: Constraint | None = None
    logprobs: int | None = None  # alternatives a token; 0: the chosen one's only; None: none
    prompt_logprobs: int | None = None  # the same of the prompt, or the given target prefix
    prompt_token_ids: bool = False  # return those of the prompt
    alignment: bool = False  # return the attention from target to source tokens
    allow_partial: bool = False  # at the deadline or a drain, finish with what there is
    max_new_tokens: int | None = None  # None: until the context is full; 0: none
    min_new_tokens: int = 0  # no end-of-sequence or stop before this many
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the matched stop in the output
    ignore_eos: bool = False  # go on past end-of-sequence
    skip_special_tokens: bool = True  # texts have none, such as <|im_end|>

    @property
    def num_sequences(self) -> int:
        """Sequences that run for one prompt."""
        if self.strategy == "beam":
            return self.beam_width
        return max(self.num_outputs, self.best_of or 0)


@dataclass(frozen=True)
class ChatMessage:
    """A message of a conversation."""

    role: str  # "user", "assistant" or what else the model's template knows
    content: str | tuple[str, ...] | None  # a text, or one in parts; None: it only calls functions
    more: Mapping[str, object] = field(default_factory=dict)  # "tool_calls" and others, as JSON


@dataclass(frozen=True)
class Chat:
    """A conversation, of which the model's chat template makes a text."""

    messages: tuple[ChatMessage, ...]
    variables: Mapping[str, object] = field(default_factory=dict)  # that the template names too
    tools: tuple[Mapping[str, object], ...] = ()  # functions that may be called, as OpenAI has them
    add_generation_prompt: bool = True  # the text ends with the beginning of an answer
    continue_final_message: bool = False  # it ends behind what the last message says


@dataclass(frozen=True)
class Deltas:
    """How a stream is cut into deltas; ends wait for nothing."""

    min_tokens: int = 1  # in each delta of a sequence but the last
    min_seconds: float = 0.0  # between two deltas of a request
    min_seconds_each: float = 0.0  # more of them for each of the requests that the engine has


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be continued (decoder) or transduced (encoder-decoder)."""

    request_id: str
    prompt: str | tuple[int, ...] | Chat  # text, or token ids used as they are
    params: SamplingParams = field(default_factory=SamplingParams)
    deadline: float | None = None  # on time.monotonic()'s clock
    input_path: str = "inputs[0]"  # the prompt's path in the protocol's request, for errors
    target_prefix: str | tuple[int, ...] = ()  # the output begins with it
    add_special_tokens: bool = True  # around a prompt that is text
    truncate_prompt_tokens: int | None = (
        None  # how many last ones of a longer prompt; None: refuse it
    )
    priority: int = 0  # lower runs earlier
    tenant: str = ""  # capacity is shared fairly between tenants
    deltas: Deltas | None = Deltas()  # None: no deltas, for the ends have the whole texts


@dataclass(frozen=True)
class ScoreRequest:
    """A target whose log-probability is wanted, behind a prompt."""

    request_id: str
    prompt: str | tuple[int, ...]
    target: str | tuple[int, ...]
    top_logprobs: int = 0  # alternatives a position
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    input_path: str = "inputs[0]"
    forced_begin: tuple[int, ...] = ()  # stand before a target that is text, and have no score
