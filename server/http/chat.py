"""Chat completions: what OpenAI's requests for them say, and the form of their answers."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from tokenweir import GeneratedSequence, StreamOptions, TokenLogprob
from tokenweir.v1 import common_pb2

from server.http.answers import Json, Positions, finish_reason, finite, token_text
from server.http.requests import GenerationRequest


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class TextPart(_Strict):
    """A part of what is said; there are no others than texts."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """What somebody says."""

    role: str
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The content, its parts joined by line ends."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class JsonSchema(_Strict):
    """A schema that the answer must fit."""

    name: str = ""
    description: str | None = None
    strict: bool | None = None  # it always holds
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Strict):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and the type json_schema belong together")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_completion_tokens or max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs=true")
        return self

    @property
    def chat(self) -> list[dict[str, str]]:
        """The conversation as our client takes it."""
        return [{"role": one.role, "content": one.text} for one in self.messages]

    @property
    def options(self) -> StreamOptions:
        """As the base's, with log-probabilities and a schema where they are asked for."""
        said = super().options
        if self.logprobs:
            said["logprobs"] = self.top_logprobs or 0
        if self.response_format is not None:
            said["json_schema"] = self.response_format.schema_of_answer
        return said

    def _apart(self) -> set[str]:
        return {"messages", "logprobs", "top_logprobs", "response_format"}


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
