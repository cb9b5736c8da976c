"""Chat completions: what OpenAI's requests for them say, and the form of their answers."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field
from tokenweir import GeneratedSequence, StreamOptions, TokenLogprob
from tokenweir.v1 import common_pb2

from server.adapters.http.answers import Json, Positions, finish_reason, finite, token_text
from server.adapters.http.requests import NEUTRAL, GenerationRequest

# Variables of chat templates that clients send by themselves.
_VARIABLES = ("enable_thinking", "reasoning_effort")


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    input_field = "messages"
    own_names = GenerationRequest.own_names | {*_VARIABLES}
    neutral = {**NEUTRAL, "add_special_tokens": (False,)}  # noqa: RUF012  # not changed

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]  # our client looks at each
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def options(self) -> StreamOptions:
        """As the base's, with log-probabilities and variables of the template where there are any.

        Raises ValueError for what does not go together.
        """
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_completion_tokens, max_tokens: give one of them only")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs=true")
        said = super().options
        if self.logprobs:
            said["logprobs"] = self.top_logprobs or 0
        given = {name: self.extra.get(name) for name in _VARIABLES}
        variables = {name: value for name, value in given.items() if value is not None}
        if variables:
            said["chat_template_kwargs"] = {**variables, **(self.chat_template_kwargs or {})}
        return said

    def _apart(self) -> set[str]:
        return {"messages", "logprobs", "top_logprobs"}

    def _sent_names(self) -> dict[str, str]:
        names = super()._sent_names()
        if self.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
        return names

    def as_sent(self, message: str) -> str:
        """As the base's; a message of the conversation is one of `messages`."""
        said = re.sub(r"\bprompt(?=[\[.])", "messages", super().as_sent(message))
        given = [name for name in _VARIABLES if self.extra.get(name) is not None]
        if self.chat_template_kwargs or len(given) != 1:
            return said
        return said.replace("chat_template_kwargs", given[0])


class ChatForm:
    """Completions of conversations."""

    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, sequence: GeneratedSequence) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": sequence.text, "refusal": None},
            "logprobs": _logprobs(sequence.logprobs),
            "finish_reason": finish_reason(sequence.finish_reason),
        }

    def first(self, index: int) -> Json | None:
        return _delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, positions: Positions, offset: int) -> Json:
        return _delta(index, {"content": text}) | {"logprobs": _logprobs(positions)}

    def last(self, index: int, reason: str) -> Json:
        return _delta(index, {}) | {"finish_reason": reason}


def _delta(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprobs(positions: Positions) -> Json | None:
    if not positions:
        return None
    content = [
        _token(position.chosen) | {"top_logprobs": [_token(one) for one in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob | common_pb2.TokenLogprob) -> Json:
    piece = token.piece
    return {"token": token_text(piece), "logprob": finite(token.logprob), "bytes": list(piece)}
