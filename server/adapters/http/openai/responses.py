"""Responses: what OpenAI's requests for them say, in the messages and options of a chat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from tokenweir import StreamOptions

from engine.wording import shortened
from server.adapters.http.openai.chat import ConversationRequest
from server.adapters.http.openai.tools import FlatChoice, FlatTool, flat_choice
from server.adapters.http.requests import Body, Json

_LOGPROBS = "message.output_text.logprobs"
# Fields of the base that change the answer of a completion, and have no place here.
_OF_COMPLETIONS = ("max_tokens", "n", "response_format", "prompt_logprobs", "return_token_ids")
_NOTHING_KEPT = "nothing is stored here; send the whole conversation as input"
_REFUSED: Mapping[str, str] = {
    "previous_response_id": _NOTHING_KEPT,
    "conversation": _NOTHING_KEPT,
    "background": "an answer comes to its request alone; leave it out",
    "prompt": "no templates of prompts are stored here; send input",
}
_ITEMS = "message", "function_call", "function_call_output", "reasoning"


def _items(value: object) -> object:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError("give a text, or a list of items, not an empty one")
    return value


def _item(value: object) -> Json:
    """Return an item of a conversation as a message of it."""
    match value:
        case {
            "type": "function_call",
            "call_id": str(called),
            "name": str(name),
            "arguments": str(arguments),
        }:
            function = {"name": name, "arguments": arguments}
            call = {"id": called, "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case {
            "type": "function_call_output",
            "call_id": str(called),
            "output": str() | list() as said,
        }:
            return {"role": "tool", "tool_call_id": called, "content": _content(said)}
        case {"type": "reasoning", **more}:
            content = more.get("content")
            parts = content if isinstance(content, list) else []
            thought = "".join(str(one.get("text", "")) for one in parts if isinstance(one, dict))
            return {"role": "assistant", "content": None, "reasoning_content": thought}
        case {"role": str(role), "content": str() | list() as said, **more} if (
            more.get("type", "message") == "message"
        ):
            return {"role": role, "content": _content(said)}
        case {"type": str(kind)} if kind not in _ITEMS:
            raise ValueError(f"{shortened(kind)} is no item that is known here; leave it out")
    raise ValueError(
        'give {"role": ..., "content": ...}, or a function_call with call_id, name and arguments, '
        "or a function_call_output with call_id and output"
    )


def _content(said: str | list[Any]) -> object:
    """Return what is said as a chat has it; our client looks at parts that are no texts."""
    if isinstance(said, str):
        return said
    return [
        {**part, "type": "text"}
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text")
        else part
        for part in said
    ] or ""


def _is_empty(message: Json) -> bool:
    """Say whether a message has its reasoning alone, which belongs to the next one."""
    return message.get("content") is None and not message.get("tool_calls")


Items = Annotated[list[Annotated[Json, PlainValidator(_item)]], BeforeValidator(_items)]


class TextFormat(Body):
    """The required form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # it always holds
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextConfig(Body):
    """The text of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: any text. ValueError for one that is missing."""
        form = self.format
        if form is None or form.type == "text":
            return None
        if form.type == "json_schema" and form.schema_ is None:
            raise ValueError("text.format.schema is missing; json_schema needs one")
        return form.schema_ or {"type": "object"}


class Reasoning(Body):
    """How long a model thinks, where its chat template can say so."""

    effort: str | None = None
    summary: str | None = None  # none is made
    generate_summary: str | None = None


class ResponsesRequest(ConversationRequest):
    """The body of `/v1/responses`."""

    input_field, id_prefix = "input", "resp_"
    # It counts tools that run here, and there are none.
    own_names = ConversationRequest.own_names | {"max_tool_calls"}
    neutral = {**ConversationRequest.neutral, "truncation": ("disabled",)}  # noqa: RUF012

    input: Items
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    metadata: dict[str, str] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    tools: list[FlatTool] | None = None
    tool_choice: FlatChoice = None

    @property
    def conversation(self) -> list[Json]:
        """As the base's: calls that follow each other are of one message, as chats have them."""
        return [message for _, message in self._messages()]

    @property
    def variables(self) -> dict[str, Any]:
        """As the base's, and the effort of reasoning."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return super().variables | ({} if effort is None else {"reasoning_effort": effort})

    @property
    def has_usage(self) -> bool:
        """As the base's: always."""
        return True

    @property
    def options(self) -> StreamOptions:
        """As the base's, with log-probabilities if they are asked for."""
        said = super().options
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            said["logprobs"] = self.top_logprobs or 0
        return said

    @property
    def echoed(self) -> Json:
        """The part of the request that stands in its answer."""
        form = self.text and self.text.format
        said = form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "store": False,
            "temperature": self.temperature,
            "text": {"format": said},
            "tool_choice": flat_choice(self.tool_choice),
            "tools": [{"type": "function", **one["function"]} for one in self.tools or ()],
            "top_p": self.top_p,
        }

    def faults(self) -> Iterator[tuple[str, str]]:
        """As the base's, and for every field of completions."""
        yield from super().faults()
        for name in _OF_COMPLETIONS:
            if getattr(self, name) is not None:
                yield name, f"{name} is not an option of /v1/responses; leave it out"

    def as_sent(self, message: str) -> str:
        """As the base's; a message is the item that it came from."""
        places = {f"input[{n}]": place for n, (place, _) in enumerate(self._messages())}
        said = super().as_sent(message).replace("reasoning_effort", "reasoning.effort", 1)
        return re.sub(r"\binput\[\d+\]", lambda found: places.get(found[0], found[0]), said)

    def _messages(self) -> Iterator[tuple[str, Json]]:
        """Yield every message with the place of the item that begins it."""
        if self.instructions is not None:
            yield "instructions", {"role": "system", "content": self.instructions}
        place, last = "", Json()
        for number, message in enumerate(self.input):
            said, calls = message["content"], message.get("tool_calls", [])
            if last.get("role") == message["role"] == "assistant" and (calls or _is_empty(last)):
                last["content"] = last["content"] if said is None else said
                if thought := message.get("reasoning_content"):
                    last["reasoning_content"] = last.get("reasoning_content", "") + thought
                last["tool_calls"] += calls  # in place: there may be many
                continue
            if not _is_empty(last):
                yield place, last
            place, last = f"input[{number}]", {**message, "tool_calls": [*calls]}
        if not _is_empty(last):
            yield place, last

    def _formats(self) -> Iterator[dict[str, Any]]:
        yield from super()._formats()
        if self.text is not None and (schema := self.text.schema_of_answer) is not None:
            yield {"json_schema": schema}

    def _apart(self) -> set[str]:
        own = {"input", "instructions", "metadata", "text", "reasoning", "include"}
        return super()._apart() | own

    def _refusal_of(self, name: str, value: object) -> str:
        if name in _REFUSED:
            return f"{name}: {_REFUSED[name]}"
        return super()._refusal_of(name, value)

    def _sent_names(self) -> dict[str, str]:
        names = super()._sent_names() | {"max_new_tokens": "max_output_tokens"}
        return names | ({"json_schema": "text"} if self.text is not None else {})
