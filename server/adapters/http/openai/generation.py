"""Requests to generate: the fields that OpenAI's have, in the options of our client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PlainValidator
from tokenweir import StreamOptions

from engine.requests.options import OPTIONS
from server.adapters.http.requests import ALSO, RENAMED, Body, ModelRequest

# Options of the server or the caller, those that have another name here, and those of no answer.
_NOT_TAKEN = frozenset(
    "request_id timeout answer_others tenant priority alignment prompt_logprobs prompt_token_ids "
    "tools add_generation_prompt continue_final_message".split()
)
# Our client's own options, which OpenAI does not have, under their own names.
_OWN_OPTIONS = frozenset(StreamOptions.__annotations__) - _NOT_TAKEN - {*RENAMED.values()}
_OF_SAMPLING = {one.name for one in OPTIONS if one.strategy == "sampling"} - {"best_of"}
_OF_SEARCH = frozenset(("strategy", "beam", "best_of", *_OF_SAMPLING))


def _texts(value: object) -> list[str]:
    match value:
        case str():
            return [value]
        case list() if all(isinstance(one, str) for one in value):
            return value
    raise ValueError("give a text, or a list of texts")


_Texts = Annotated[list[str], PlainValidator(_texts)]


class StreamDetails(Body):
    """How a stream ends."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every chunk, besides
    include_obfuscation: bool | None = None  # nothing is added here, which may be asked for


class JsonSchema(Body):
    """A schema that the answer must fit."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # it always holds
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """The required form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: any text. ValueError for one with another type."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format: json_schema and the type json_schema go together")
        if self.json_schema is not None:
            return self.json_schema.schema_
        return None if self.type == "text" else self.schema_ or {"type": "object"}


class StructuredOutputs(Body):
    """The same, as vLLM has it."""

    json_: Any = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The given values, as options of our client."""
        schema = {"type": "object"} if self.json_object else self.json_
        given: dict[str, Any] = {"json_schema": schema, "regex": self.regex}
        given |= {"choice": self.choice, "grammar": self.grammar}
        return {name: value for name, value in given.items() if value is not None}


class GenerationRequest(ModelRequest):
    """The fields that both kinds of completion share."""

    own_names = _OWN_OPTIONS | {*ALSO}

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: _Texts | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None  # as vLLM has it, like the next
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamDetails | None = None

    @property
    def comes_whole(self) -> bool:
        """Whether a stream has an answer in one piece."""
        return False

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with what it took."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        """Whether every chunk of a stream says what it took so far."""
        details = self.stream_options
        return self.has_usage and details is not None and bool(details.continuous_usage_stats)

    @property
    def leaves_search_open(self) -> bool:
        """Whether several outputs are asked for, and not how they are to be found."""
        return (self.n or 1) > 1 and not _OF_SEARCH & self.options.keys()

    @property
    def options(self) -> StreamOptions:
        """The options of our client; what is left out has the model's default.

        Raises ValueError for what does not go together.
        """
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs is for answers that are no stream; leave one of them out"
            )
        apart = {"model", "request_id", "stream", "stream_options", "return_token_ids"}
        apart |= self._apart()
        typed = self.model_dump(exclude={*apart, *self.extra, *_OF_ANSWER})
        own = {n: value for n, value in self.extra.items() if n in GenerationRequest.own_names}
        said = {
            RENAMED.get(name, ALSO.get(name, name)): value
            for name, value in (typed | own).items()
            if value is not None
        }
        for form in self._formats():
            if said.keys() & form.keys():
                raise ValueError("what the answer must be is said twice; say it once")
            said |= form
        if self.return_token_ids:
            said["prompt_token_ids"] = True
        if said.get("top_k") == -1:
            said["top_k"] = 0  # all
        if said.get("seed") == -1:
            del said["seed"]  # any
        if said.get("truncate_prompt_tokens") == -1:
            said["truncate_prompt_tokens"] = 2**31 - 1  # as many as the model takes
        if said.get("length_penalty") == 1 and "beam" not in said:  # a default without a search
            del said["length_penalty"]
        if self.temperature == 0:  # the most likely token, whatever else is said of sampling
            said = {name: said[name] for name in said if name not in _OF_SAMPLING}
            said.setdefault("strategy", "greedy")
        return cast(StreamOptions, said)

    def _formats(self) -> Iterator[dict[str, Any]]:
        """Yield what the answer's text must be, as options of our client."""
        if self.structured_outputs is not None:
            yield self.structured_outputs.options
        if self.response_format is not None:
            if (schema := self.response_format.schema_of_answer) is not None:
                yield {"json_schema": schema}

    def _apart(self) -> set[str]:
        """Return the fields that are not options."""
        return set()

    def _sent_names(self) -> dict[str, str]:
        names = super()._sent_names()
        for name in _OF_ANSWER:
            if getattr(self, name) is not None:
                names["json_schema"] = name
        return names


_OF_ANSWER = ("structured_outputs", "response_format")
