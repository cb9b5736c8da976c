"""Requests in JSON: their fields, what is refused of them, and how a refusal names it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, PlainValidator
from tokenweir import AsyncClient, ModelInfo

from engine.requests.options import OPTIONS
from engine.wording import shortened
from server.adapters.http.errors import unknown_model

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
RENAMED: Mapping[str, str] = {  # options of our client that have another name here
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_outputs",
}
ALSO: Mapping[str, str] = {  # those that have another name besides
    "include_stop_str_in_output": "include_stop",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
INSTEAD: Mapping[str, str] = {  # options of other servers, and those that do it here
    "functions": "tools",
    "function_call": "tool_choice",
    "thinking_budget_tokens": "enable_thinking",
    "thinking_forced_open": "enable_thinking",
    "thinking_token_budget": "enable_thinking",
    "use_beam_search": "beam",
    "bad_words": "banned_sequences",
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "n_cmpl": "n",
    "n_probs": "logprobs",
    "return_tokens": "return_token_ids",
    "return_tokens_as_token_ids": "return_token_ids",
    "truncation_side": "truncate_prompt_tokens",
    "n_keep": "truncate_prompt_tokens",
}
_LIKENESS, _MAX_NAME_CHARS = 0.7, 64  # a name that may have been meant
Json = dict[str, Any]
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


Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts)]


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


class ModelRequest(Body):
    """A request; beside its fields there may be options that only our server knows."""

    input_field: ClassVar[str]
    id_prefix: ClassVar[str]  # begins the id of a request that has none
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
        if (instead := INSTEAD.get(name)) in self._known_names():
            return f"{name} is not an option of this server; send {instead} in its place"
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
        names |= {ours: name for name, ours in ALSO.items() if name in given}
        others = {
            ours: name for name, ours in RENAMED.items() if name in given or ours not in names
        }
        return names | others


class RequestOfOneModel(ModelRequest):
    """A request that need not name a model where one that can do it is served."""

    capability: ClassVar[str]

    model: str = ""

    async def found(self, client: AsyncClient) -> ModelInfo:
        """Return the model that is asked; of several, one that does nothing else comes first.

        Raises HttpError for none.
        """
        name, models = self.capability, await client.models()
        able = [one for one in models if name in one.capabilities and self.model in ("", one.model)]
        if not able:
            raise unknown_model(self.model, name, models)
        return min(able, key=lambda one: one.capabilities.index(name))
