"""OpenAI's requests, in the options of our client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from tokenweir import ModelInfo, StreamOptions

from engine.requests.options import OPTIONS
from engine.wording import shortened

# Nothing of an answer depends on these.
_HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options parallel_tool_calls cache_prompt".split()
)
# Values that say the same as nothing, as null, false and empty ones do for every other name.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "tool_choice": ("none", "auto"),  # without tools
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "priority": (0,),
    "add_generation_prompt": (True,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "do_sample": (),  # false means something, too
    "think": (),
    "stream": (False,),
    "top_logprobs": (0,),
    "repeat_penalty": (1,),
    "include_reasoning": (True, False),
    "separate_reasoning": (True, False),
    "verbosity": ("medium",),
}
_ABSENT: tuple[object, ...] = (None, False, "", [], {})
_TOOLS = {"tools": "tool_choice", "functions": "function_call"}  # "none" there rules them out
_RENAMED: Mapping[str, str] = {  # options of our client that have another name here
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_outputs",
}
_ALSO: Mapping[str, str] = {  # those that have another name besides
    "include_stop_str_in_output": "include_stop",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# Options of the server or the caller, those named above, and those that no answer here has.
_NOT_TAKEN = frozenset(
    "request_id timeout answer_others tenant priority alignment prompt_logprobs prompt_token_ids "
    "tools add_generation_prompt continue_final_message".split()
)
# Our client's own options, which OpenAI does not have, under their own names.
OWN_OPTIONS = frozenset(StreamOptions.__annotations__) - _NOT_TAKEN - {*_RENAMED.values()}
_OF_SAMPLING = {one.name for one in OPTIONS if one.strategy == "sampling"} - {"best_of"}
_OF_SEARCH = frozenset(("strategy", "beam", "best_of", *_OF_SAMPLING))
_LIKENESS, _MAX_NAME_CHARS = 0.7, 64  # a name that may have been meant
MAX_INPUTS = 2048  # per request, as OpenAI takes; our client divides them

# A field of our protocol in a message, and the names of our client's options.
_PATH = re.compile(
    r"\b(?:request\.)?(?:(?P<many>inputs|items|prompts)(?:\[(?P<number>\d+)\]|(?=:))"
    r"|decoding|stopping|output|scheduling)(?P<rest>(?:\.\w+|\[-?\w+\])*)"
)
_LAST = re.compile(r"(\w+)((?:\[-?\w+\])*)$")
_OPTIONS_OF_FIELDS = {one.wire: one.name for one in OPTIONS} | {"constraint": "json_schema"}


def _prompts(value: object) -> list[str | list[int]]:
    """Return one prompt or several as several; ValueError for none."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_ids(value):
            return [value]
        if len(value) > MAX_INPUTS:
            raise ValueError(f"{len(value):,} are more than {MAX_INPUTS:,}; send fewer")
        if all(isinstance(one, str) for one in value) or all(
            one and _are_ids(one) for one in value
        ):
            return value
    raise ValueError(
        "give a text or token ids, or a list of the one or the other, not an empty one"
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _texts(value: object) -> list[str]:
    match value:
        case str():
            return [value]
        case list() if all(isinstance(one, str) for one in value):
            return value
    raise ValueError("give a text, or a list of texts")


Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts)]
_Texts = Annotated[list[str], PlainValidator(_texts)]


class Body(BaseModel):
    """The content of a request, or of an object in it, with the types that JSON has."""

    model_config = ConfigDict(extra="allow", strict=True)

    @property
    def extra(self) -> Mapping[str, Any]:
        """The members that are no field of the model."""
        return self.model_extra or {}

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield every field that says something and is not taken, with what is said of it."""
        for name, value in self.extra.items():
            if not self._is_taken(name, value):
                yield name, self._refusal_of(name, value)
        for name in type(self).model_fields:
            if isinstance(inner := getattr(self, name), Body):
                yield from ((f"{name}.{one}", f"{name}.{what}") for one, what in inner.faults())

    def _is_taken(self, name: str, value: object) -> bool:
        if value in (False, 0):  # may be meant, under a misspelt name
            return not self._nearest(name)
        return value in _ABSENT

    def _refusal_of(self, name: str, value: object) -> str:
        near = self._nearest(name)
        way_out = f"the nearest is {near[0]}" if near else "leave it out"
        return f"{shortened(name)} is not an option of this server; {way_out}"

    def _nearest(self, name: str) -> list[str]:
        """Return the known name that is most like one which is not, if any is."""
        known = self._known_names() if len(name) <= _MAX_NAME_CHARS else ()
        return get_close_matches(name, known, 1, _LIKENESS)

    def _known_names(self) -> Sequence[str]:
        return [field.alias or name for name, field in type(self).model_fields.items()]


class OpenAiRequest(Body):
    """A request; beside its fields there may be options that only our server knows."""

    input_field: ClassVar[str]
    own_names: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = NEUTRAL

    model: str
    request_id: str | None = None

    @property
    def num_inputs(self) -> int:
        """How many inputs it has."""
        return 1

    def _is_taken(self, name: str, value: object) -> bool:
        is_ruled_out = name in _TOOLS and self.extra.get(_TOOLS[name]) == "none"
        if name in self.neutral:
            return value is None or value in self.neutral[name]
        return name in self._known_names() or is_ruled_out or super()._is_taken(name, value)

    def _known_names(self) -> Sequence[str]:
        return (*super()._known_names(), *self.own_names, *_HARMLESS)

    def _refusal_of(self, name: str, value: object) -> str:
        if name in self.neutral:
            said = shortened(json.dumps(value))
            return f"{name}={said} is not an option of this server; leave it out"
        return super()._refusal_of(name, value)

    def as_sent(self, message: str) -> str:
        """Return a message with the fields of our protocol and client as the request calls them."""
        names = self._sent_names()

        def renamed(path: re.Match[str]) -> str:
            rest: str = path["rest"].replace("].ids[", "][")  # lists of lists
            if path["many"] is None:
                if (last := _LAST.search(rest)) is None:
                    return path[0]  # a word of the message
                option = _OPTIONS_OF_FIELDS.get(last[1], last[1])
                return names.get(option, option) + last[2]
            if rest == ".truncate_prompt_tokens":
                return rest[1:]
            if rest.startswith(".prefix"):
                return "target_prefix"
            if rest.startswith((".chat.tools", ".chat.continue_final_message")):
                return rest.removeprefix(".chat.")
            if rest == ".chat.template_variables":
                return "chat_template_kwargs"
            is_one_of = path["number"] is not None and self.num_inputs > 1
            place = f"[{path['number']}]" if is_one_of else ""
            index = re.search(r"(?:^|\.ids)(\[\d+\].*)$", rest)  # an id, or a message
            return f"{self.input_field}{place}{index[1] if index else ''}"

        named = _PATH.sub(renamed, message)
        return re.sub(rf"\b({'|'.join(names)})\b", lambda word: names[word[0]], named)

    def _sent_names(self) -> dict[str, str]:
        """Return what the request calls options of our client, where it does not call them so."""
        given = {*self.model_fields_set, *self.extra}
        names = {"max_new_tokens": "max_tokens"}  # the first of its two names
        names |= {ours: name for name, ours in _ALSO.items() if name in given}
        others = {
            ours: name for name, ours in _RENAMED.items() if name in given or ours not in names
        }
        return names | others


class RequestOfOneModel(OpenAiRequest):
    """A request that need not name a model where one that can do it is served."""

    capability: ClassVar[str]

    model: str = ""

    def found_in(self, models: Iterable[ModelInfo]) -> ModelInfo | None:
        """Return the model that is asked; of several, one that does nothing else comes first."""
        name = self.capability
        able = [one for one in models if name in one.capabilities and self.model in ("", one.model)]
        return min(able, key=lambda one: one.capabilities.index(name), default=None)


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


class GenerationRequest(OpenAiRequest):
    """The fields that both kinds of completion share."""

    own_names = OWN_OPTIONS | {*_ALSO}

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
            _RENAMED.get(name, _ALSO.get(name, name)): value
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
