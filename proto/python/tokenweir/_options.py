"""The keyword options of the client's calls, typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

Prompt = str | Sequence[int]  # text, or token ids


class TextPart(TypedDict):
    """A part of what somebody says."""

    type: Literal["text"]
    text: str


class Message(TypedDict):
    """A message of a conversation.

    One of "assistant" may have `tool_calls`, without content; one of "tool", what came of a call,
    has `tool_call_id` and may have `name`, both as OpenAI has them.

    Fields that other clients of chat APIs add may be null, false or empty; `name` and `parsed` may
    have any value. None of them is sent.
    """

    role: str  # "system", "user", "assistant", "tool" or what the model's chat template knows
    content: str | Sequence[TextPart]


Chat = Sequence[Message | Mapping[str, object]]  # the model's chat template makes a text of it
# Text, pair of texts, encoded image, file of one, token ids.
Item = str | tuple[str, str] | bytes | Path | Sequence[int]
Truncate = Literal["left", "right"]
Aggregation = Literal["simple", "first", "average", "max"]  # how tokens become entities


class OperationOptions(TypedDict, total=False):
    """Options of what an operator asks for."""

    request_id: str | None  # asked again with the same one, what it has begun is waited for
    timeout: float | None  # seconds to wait, 600 if left out; it goes on in any case


class LoadOptions(OperationOptions, total=False):
    """Options of a load."""

    model: str | None  # that requests name; that of the package if left out
    model_version: str | None  # that the package must have
    replicas: int | None  # as many as the server was started with if left out
    share: float | None  # percent of the calls that name no version; 0 if left out
    validate_only: bool | None  # check the package, start nothing


class CallOptions(TypedDict, total=False):
    """Options of every call that runs a model."""

    model_version: str | None
    request_id: str | None  # one is made if it is left out
    timeout: float | None  # seconds; None: no deadline
    answer_others: bool | None  # False: one refused input ends the call at once


class SchedulingOptions(TypedDict, total=False):
    """Options that say when, and how exactly, a request runs."""

    priority: int | None  # lower runs earlier
    tenant: str | None  # capacity is shared fairly between tenants
    batch_invariant: bool | None  # True: or refuse; False: last bits may depend on the batch


class GenerateOptions(CallOptions, SchedulingOptions, total=False):
    """Options of a generation: the fields of SamplingParams under names that read well in a call.

    None is the same as leaving an option out, but for `timeout`. An option that is left out has the
    model's default, if its package has one (ModelInfo.defaults), which an empty list rules out.
    """

    # "greedy", "sampling" or "beam". Left out: what other options imply, or the model's default.
    strategy: str | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    seed: int | None  # left out: the server draws one and reports it
    best_of: int | None  # sample so many, return the num_outputs best
    beam: int | None  # hypotheses kept by beam search
    length_penalty: float | None  # p of n ** p, beam search; left out: 0.6 in the paper's form
    length_penalty_form: str | None  # "power"; or "paper": ((5 + n) / 6) ** p
    # When beam search ends: "bound", as soon as no open hypothesis can win; "estimate", once `beam`
    # have ended and none that is open scores more as it is; "enough", once `beam` have ended;
    # "limit", at max_new_tokens. Left out: "bound".
    beam_end: str | None
    renormalize: bool | None  # tokens that controls leave to beam search add up to 1 again
    num_outputs: int | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    no_repeat_ngram: int | None
    logit_bias: Mapping[int, float] | None  # by token id
    banned_tokens: Sequence[int] | None
    banned_sequences: Sequence[Sequence[int]] | None  # runs of token ids
    allowed_token_ids: Sequence[int] | None  # no others, an end of the sequence neither
    begin_banned_tokens: Sequence[int] | None  # not the first token that is not forced
    encoder_no_repeat_ngram: int | None  # no run of so many tokens that the source has
    forced_begin: Sequence[int] | None  # the first generated tokens; `target_prefix` replaces them
    forced_end: int | None  # the last token that max_new_tokens or the context allows
    json_schema: str | Mapping[str, object] | None  # at most one of these four
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None
    target_prefix: Prompt | None  # the output begins with it
    add_special_tokens: bool | None  # False: none stand around a prompt that is text
    truncate_prompt_tokens: int | None  # how many last ones of a longer prompt; left out: refuse it
    # Variables that the model's chat template names besides, such as {"enable_thinking": False}.
    chat_template_kwargs: Mapping[str, object] | None
    # Functions that may be called, for the chat template: {"type": "function", "function": {...}}.
    # What the model writes of them is in the text, in its own format.
    tools: Sequence[Mapping[str, object]] | None
    add_generation_prompt: bool | None  # False: a conversation's text ends with its last message
    continue_final_message: bool | None  # the answer continues what the last message says
    max_new_tokens: int | None  # left out: the model's limit
    min_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    ignore_eos: bool | None
    logprobs: int | None  # alternatives of every token; 0: the token's own only
    prompt_logprobs: int | None  # the same of the prompt or the target prefix
    prompt_token_ids: bool | None  # what the prompt was made into: ids and pieces
    alignment: bool | None  # attention from every output token to the source
    skip_special_tokens: bool | None  # False: texts have special tokens, such as <|im_end|>
    without_defaults: Sequence[str] | None  # names of defaults that do not hold; "*": none does
    allow_partial: bool | None  # at the deadline or a drain, return what there is


class StreamOptions(GenerateOptions, total=False):
    """Options of a streamed generation."""

    tokens_per_message: int | None


class ScoreOptions(CallOptions, SchedulingOptions, total=False):
    """Options of the scoring of a target."""

    top_logprobs: int | None  # alternatives of every token


class PredictOptions(CallOptions, total=False):
    """Options of a one-pass prediction."""

    text_pair: str | None  # the second text of a pair
    truncate: Truncate | None  # the side that is cut off a text that is too long; or it is refused
