"""Chat completions: what OpenAI's requests for them say, and the form of their answers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field
from tokenweir import GeneratedSequence, Result, StreamOptions, TokenLogprob
from tokenweir.v1 import common_pb2

from server.adapters.http.openai.answers import (
    Positions,
    finish_reason,
    finite,
    prompt_json,
    token_text,
)
from server.adapters.http.openai.generation import GenerationRequest
from server.adapters.http.openai.reasoning import ReasoningReader
from server.adapters.http.openai.token_texts import TokenTexts
from server.adapters.http.openai.tool_calls import CallReader
from server.adapters.http.openai.tools import Calling, Choice, Tool
from server.adapters.http.requests import NEUTRAL, Json

# Variables of chat templates that clients send by themselves.
_VARIABLES = ("enable_thinking", "reasoning_effort")


class ConversationRequest(GenerationRequest):
    """The fields that all requests for an answer in a conversation share."""

    own_names = GenerationRequest.own_names | {*_VARIABLES}
    neutral = {  # noqa: RUF012  # not changed
        **NEUTRAL,
        "add_special_tokens": (False,),
        "include_reasoning": (True,),
    }

    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template that have a field of their own."""
        given = {name: self.extra.get(name) for name in _VARIABLES}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def calling(self) -> Calling | None:
        """The functions that may be called; None: none. ValueError for a choice among none."""
        choice = self.tool_choice or "auto"
        if not self.tools and choice not in ("none", "auto"):
            raise ValueError("tool_choice is for tools, and there are none")
        if not self.tools or choice == "none":
            return None
        return Calling(self.tools, choice, self.parallel_tool_calls is not False)

    @property
    def options(self) -> StreamOptions:
        """As the base's, with variables of the template where there are any."""
        said = super().options
        if variables := self.variables:
            said["chat_template_kwargs"] = {**variables, **(self.chat_template_kwargs or {})}
        return said

    def _apart(self) -> set[str]:
        return set("top_logprobs tools tool_choice parallel_tool_calls".split())

    def _sent_names(self) -> dict[str, str]:
        names = super()._sent_names()
        if self.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
        if self.tools:
            names["grammar"] = "tools"
        return names

    def as_sent(self, message: str) -> str:
        """As the base's; a message of the conversation is one of its field."""
        said = re.sub(r"\bprompt(?=[\[.])", self.input_field, super().as_sent(message))
        given = [*self.variables]
        if self.chat_template_kwargs or len(given) != 1:
            return said
        return said.replace("chat_template_kwargs", given[0])


class ChatRequest(ConversationRequest):
    """The body of `/v1/chat/completions`."""

    input_field, id_prefix = "messages", "chatcmpl-"

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]  # our client looks at each
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def options(self) -> StreamOptions:
        """As the base's, with log-probabilities if they are asked for.

        Raises ValueError for what does not go together.
        """
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_completion_tokens, max_tokens: give one of them only")
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:  # a limit of none, where a client means no limit
                raise ValueError(f"{name}: 0 is below 1; leave it out for the model's limit")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs=true")
        said = super().options
        if self.logprobs:
            said["logprobs"] = self.top_logprobs or 0
        return said

    def _apart(self) -> set[str]:
        return super()._apart() | {"messages", "logprobs"}


Reader = CallReader | ReasoningReader


class ChatForm:
    """Completions of conversations; where functions may be called, a reader finds the calls."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"
    has_prompts_in_choices = False

    def __init__(
        self,
        asked: ConversationRequest,
        reader: Callable[[], CallReader] | None = None,
        *,
        is_named: bool = False,
        is_constrained: bool = False,
    ) -> None:
        """`is_named`: one function is called in any case, whose end OpenAI calls "stop".

        `is_constrained`: the text must have a form, which leaves no place for reasoning.
        """
        self._is_separate = (
            not is_constrained and asked.extra.get("separate_reasoning") is not False
        )
        self._asked, self._reader, self._is_named = asked, reader, is_named
        self._readers: dict[int, Reader | None] = {}
        self._texts: defaultdict[int, TokenTexts] = defaultdict(TokenTexts)
        self._positions: defaultdict[int, list[Any]] = defaultdict(list)  # for held-back text

    def choice(self, index: int, sequence: GeneratedSequence, result: Result) -> Json:
        chunks = self.chunks(index, sequence, result)
        message = {"role": "assistant", "refusal": None, **_whole([one["delta"] for one in chunks])}
        told = [token for one in chunks for token in (one["logprobs"] or {}).get("content", ())]
        found = {
            "index": index,
            "message": message,
            "logprobs": {"content": told, "refusal": None} if told else None,
            "finish_reason": chunks[-1]["finish_reason"],
        }
        if self._asked.return_token_ids:
            found["token_ids"] = list(sequence.token_ids)
        return found

    def chunks(self, index: int, sequence: GeneratedSequence, result: Result) -> list[Json]:
        """Return one output as a stream says it, behind its beginning."""
        self._begin(index, result.reasoning)
        pieces = self.piece(index, sequence.text, sequence.logprobs, 0)
        return [*pieces, *self.last(index, finish_reason(sequence.finish_reason))]

    def of_prompt(self, result: Result) -> Json:
        return prompt_json(
            result,
            with_logprobs=self._asked.prompt_logprobs is not None,
            with_ids=bool(self._asked.return_token_ids),
        )

    def first(self, index: int, reasoning: str) -> Json | None:
        self._begin(index, reasoning)
        return _delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, positions: Positions, offset: int) -> Iterator[Json]:
        if (reader := self._readers.get(index)) is None:
            yield _delta(index, {"content": text}) | {"logprobs": _logprobs(positions)}
            return
        if not positions:
            yield from self._deltas(index, reader.push(text))
        parts = self._texts[index].push(text, [one.chosen.piece for one in positions])
        for position, part in zip(positions, parts, strict=True):
            self._positions[index].append(position)  # a delta has those of its own tokens
            yield from self._deltas(index, reader.push(part))

    def last(self, index: int, reason: str) -> Iterator[Json]:
        if (reader := self._readers.get(index)) is not None:
            found = reader.finish(is_cut=reason != "stop")
            has_more = found or not self._positions[index]
            yield from self._deltas(index, found if has_more else [{"content": ""}])
            reason = self._reason(reader, reason)
        yield _delta(index, {}) | {"finish_reason": reason}

    def _begin(self, index: int, reasoning: str) -> None:
        calls = None if self._reader is None else self._reader()
        has_reasoning = reasoning in ("marked", "begun") and self._is_separate
        is_begun = reasoning == "begun"
        reader = ReasoningReader(calls, is_begun=is_begun) if has_reasoning else calls
        self._readers[index] = reader

    def _deltas(self, index: int, deltas: Sequence[Json]) -> Iterator[Json]:
        for delta in deltas:
            yield _delta(index, delta) | {"logprobs": _logprobs(self._positions.pop(index, []))}

    def _reason(self, reader: Reader, reason: str) -> str:
        is_call = reason == "stop" and reader.num_calls and not self._is_named
        return "tool_calls" if is_call else reason


def _whole(deltas: Sequence[Json]) -> Json:
    """Return the content and the calls of all deltas of an answer."""
    calls: list[Json] = []
    for delta in deltas:
        for said in delta.get("tool_calls", ()):
            if "id" in said:
                calls.append({name: said[name] for name in said if name != "index"})
            else:
                calls[said["index"]]["function"]["arguments"] += said["function"]["arguments"]
    content = "".join(delta.get("content", "") for delta in deltas)
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    found: Json = {"reasoning_content": thought} if thought else {}
    if calls:
        return found | {"content": content or None, "tool_calls": calls}
    return found | {"content": content}


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
