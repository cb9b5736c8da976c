"""Functions that a model may call: what requests say of them, and how it is held to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast, get_args

from pydantic import PlainValidator
from tokenweir import ModelInfo, StreamOptions

from engine.text.chat_format import ToolFormat
from engine.text.lark import json_rule, literal
from engine.wording import listed, shortened
from server.adapters.http.openai.tool_calls import CallReader

_CAPABILITY = "tools:"  # the format of a model stands behind it
_NAMED = "="  # stands before the name of the one function that is to be called
_NO_PARAMETERS = {"properties": {}, "additionalProperties": False}
_OF_FUNCTIONS = ("description", "parameters", "strict")
_CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")


def _tool(value: object) -> dict[str, Any]:
    """Return a function as it was sent, for the chat template."""
    match value:
        case {"type": "function", "function": {"name": str(name), **more}} if name:
            if not isinstance(more.get("parameters") or {}, dict):
                raise ValueError("the parameters of a function are a JSON schema")
            json.dumps(value, allow_nan=False)  # pydantic takes NaN, which is no JSON
            return cast(dict[str, Any], value)
        case {"type": str(kind)} if kind != "function":
            raise ValueError(f"{shortened(kind)} is no type that is known here; give functions")
    raise ValueError('give {"type": "function", "function": {"name": ..., "parameters": ...}}')


def _choice(value: object) -> str | None:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(name)}} if name:
            return _NAMED + name
    raise ValueError(
        'give "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    )


def _flat_tool(value: object) -> dict[str, Any]:
    """Return a function as chat templates want it, of one whose fields stand beside its type."""
    match value:
        case {"type": "function", "name": str(name), **more}:
            said = {one: more[one] for one in _OF_FUNCTIONS if more.get(one) is not None}
            return _tool({"type": "function", "function": {"name": name, **said}})
        case {"type": "function"}:
            raise ValueError('give {"type": "function", "name": ..., "parameters": ...}')
    return _tool(value)


def _flat_choice(value: object) -> str | None:
    match value:
        case {"type": "function", "name": str(name)} if name:
            return _NAMED + name
        case dict():
            raise ValueError('give "none", "auto", "required" or {"type": "function", "name": ...}')
    return _choice(value)


def is_constrained(options: StreamOptions) -> bool:
    """Say whether the text of an answer must have a form."""
    return any(options.get(name) is not None for name in _CONSTRAINTS)


def flat_choice(choice: str | None) -> str | dict[str, str]:
    """Return a choice as a response says it."""
    choice = choice or "auto"
    name = choice.removeprefix(_NAMED)
    return choice if name == choice else {"type": "function", "name": name}


Tool = Annotated[dict[str, Any], PlainValidator(_tool)]
Choice = Annotated[str | None, PlainValidator(_choice)]
# As /v1/responses has them.
FlatTool = Annotated[dict[str, Any], PlainValidator(_flat_tool)]
FlatChoice = Annotated[str | None, PlainValidator(_flat_choice)]


@dataclass(frozen=True)
class Calling:
    """Functions, and whether they may or must be called."""

    tools: Sequence[Mapping[str, Any]]
    choice: str  # "auto", "required", or a name behind "="
    is_parallel: bool  # several calls in an answer

    @property
    def is_named(self) -> bool:
        """Whether one function is called in any case."""
        return self.choice.startswith(_NAMED)

    def reader(self, model: ModelInfo) -> CallReader:
        """Return what reads one answer of a model."""
        is_single = self.is_named or not self.is_parallel
        is_required = self.choice != "auto"
        return CallReader(self._format_of(model), is_single=is_single, is_required=is_required)

    def options(self, said: StreamOptions, model: ModelInfo) -> StreamOptions:
        """Return the options of our client with which calls come, and are of the functions.

        Raises ValueError for a model whose calls cannot be read, and for what does not go together.
        """
        form, found = self._format_of(model), dict(said)
        found |= {"tools": self.tools, "skip_special_tokens": False}  # calls may begin with one
        answer = found.get("json_schema")
        if self.choice != "auto":
            if given := [name for name in _CONSTRAINTS if found.pop(name, None) is not None]:
                if given != ["json_schema"]:  # the answer that calls replace
                    raise ValueError(f"{given[0]}: calls are required; leave one of the two out")
            found["grammar"] = self._grammar(form, None)
            if form == "mistral":  # a grammar cannot write the token
                found.setdefault("target_prefix", "[TOOL_CALLS]")
        elif isinstance(answer, Mapping):
            del found["json_schema"]
            found["grammar"] = self._grammar(form, answer)
        return cast(StreamOptions, found)

    def _format_of(self, model: ModelInfo) -> ToolFormat:
        known = get_args(ToolFormat)
        for form in known:
            if f"{_CAPABILITY}{form}" in model.capabilities:
                return cast(ToolFormat, form)
        raise ValueError(
            f"tools: the chat template of {model.model} knows none, or writes calls in another "
            f"format than {listed(known)}; leave them out, take another model, or say tool_format "
            "in chat.json of its checkpoint and export it again"
        )

    def _grammar(self, form: ToolFormat, answer: Mapping[str, Any] | None) -> str:
        """Return a grammar of one call or more, or of a JSON answer in their place."""
        functions = [tool["function"] for tool in self.tools]
        if self.is_named:
            functions = [one for one in functions if _NAMED + one["name"] == self.choice]
            if not functions:
                name = shortened(self.choice.removeprefix(_NAMED))
                raise ValueError(f"tool_choice: {name} is none of the tools")
        begin, between, end = {
            "hermes": ("<tool_call>\n", "\n", "\n</tool_call>"),
            "llama3_json": ("", "; ", ""),
            "mistral": ("", ", ", ""),
        }[form]
        more = "" if self.is_named or not self.is_parallel else f"({literal(between)} call)*"
        calls = f"call {more}"
        if form == "mistral":
            calls = f'"[TOOL_CALLS]"? "[" {calls} "]"'
        names = [f"call{place}" for place in range(len(functions))]
        arguments = "parameters" if form == "llama3_json" else "arguments"
        rules = [
            "start: calls" + ("" if answer is None else " | answer"),
            f"calls: {calls}",
            f"call: {literal(begin)} ({' | '.join(names)}) {literal(end)}",
        ]
        if answer is not None:
            rules.append(f"answer: {json_rule(answer)}")
        for name, one in zip(names, functions, strict=True):
            head = f'{{"name": {json.dumps(one["name"])}, "{arguments}": '
            schema = {"type": "object", **(one.get("parameters") or _NO_PARAMETERS)}
            rules.append(f'{name}: {literal(head)} arguments_{name} "}}"')
            rules.append(f"arguments_{name}: {json_rule(schema)}")
        return "\n".join(rules)
