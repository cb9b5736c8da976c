"""Makes the text of a conversation, as the model was trained with it."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from engine.requests.request import Chat, Reasoning
from engine.text.chat_format import THINK, THINK_END, ChatFormat
from engine.wording import listed

_MAX_CHARS = 2**20  # in a conversation, its text, and any text in between
_MAX_TURNS = 10**6  # all loops of a template together, for one conversation
_GIVEN = frozenset({"messages", "add_generation_prompt"})  # by the server
# A request may have none, but a template may name them, as it may in transformers.
_NONE = {"tools": None, "documents": None}
_PROBES = "probe one", "probe two"
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # stands behind the message that is continued

Messages = Sequence[Mapping[str, object]]


class UnboundedError(TemplateError):
    """A template goes beyond its bounds: it is not a conversation that it refuses."""


class ChatTemplate:
    """Applies the template of a model, one conversation after the other; any thread may ask.

    A template is a program that came with a model. Jinja's sandbox keeps it from all but what it is
    given; its loops, and the texts that it makes, are bounded.
    """

    def __init__(self, form: ChatFormat) -> None:
        """Raise ValueError for variables of the format that the template does not name."""
        self._form = form
        self.tool_format = form.tool_format
        self._lock = threading.Lock()
        self._turns = 0  # in the conversation that is being rendered
        self._problem: Exception | None = None
        self._named: frozenset[str] = frozenset()
        try:
            self._template = self._compile(form.template)
        except (TemplateError, RecursionError) as error:
            self._problem = error
        if (problem := self.problem_of(form.variables)) is not None:
            raise ValueError(f"variables: {problem}")
        self._takes_texts, self._takes_parts = self._forms_of_content()

    def problem_of(self, variables: Collection[str]) -> str | None:
        """Return what is wrong with variables of a request, by their names."""
        if unknown := [name for name in variables if name not in self._named - _GIVEN]:
            others = self._named - _GIVEN - self._form.tokens.keys() - _NONE.keys()
            return (
                f"the model's chat template has no variable {listed(unknown)} to be set; "
                f"it has {listed(sorted(others)) or 'none'}"
            )
        return None

    def problem_of_tools(self, chat: Chat) -> str | None:
        """Return what is wrong with functions that a conversation may call, or has called."""
        has_called = any("tool_calls" in one.more for one in chat.messages)
        if chat.tools and "tools" not in self._named:
            return "the model's chat template knows no tools; leave them out, or take another model"
        if has_called and "tool_calls" not in self._form.template:
            return "the model's chat template knows no tool_calls; send what was called as content"
        return None

    def reasoning_behind(self, chat: Chat, end: str) -> Reasoning | None:
        """Return how an answer begins with reasoning, by the end of its prompt; None: with none."""
        if THINK_END not in self._form.template:
            return None
        is_begun = end.rstrip().endswith(THINK)
        if chat.continue_final_message and (content := chat.messages[-1].content):
            said = content if isinstance(content, str) else content[-1]
            is_begun = said.rfind(THINK) > said.rfind(THINK_END)
        return "begun" if is_begun else "marked"

    def render(self, chat: Chat) -> str:
        """Return the text, up to where the answer begins: its own turn, or the end of a message.

        Raises ValueError, saying why, if the template refuses the conversation, leaves out all of
        it, or goes beyond its bounds.
        """
        contents = [one.content for one in chat.messages if one.content is not None]
        said = [part for one in contents for part in ([one] if isinstance(one, str) else one)]
        if (count := sum(map(len, said))) > _MAX_CHARS:
            raise ValueError(f"{count:,} characters are more than {_MAX_CHARS:,}; send fewer")
        with self._lock:
            if chat.continue_final_message:
                text = self._continued(chat)
            else:
                text = self._render(self._messages(chat), chat)
            shown = any(part.strip() in text for part in said if part.strip())
            if said and not shown and text == self._without(chat):
                raise ValueError(
                    "the model's chat template leaves out all that is said; send other roles, or "
                    "a text in place of the conversation"
                )
        return text

    def _without(self, chat: Chat) -> str | None:
        """Return the text of the conversation with other words; None if it has none."""
        said = self._content(_PROBES[0])
        others = [{**one, "content": said} for one in self._messages(chat)]
        try:
            return self._render(others, chat)
        except ValueError:
            return None

    def _continued(self, chat: Chat) -> str:
        """Return the text up to the end of what the last message says, as transformers does."""
        *before, last = self._messages(chat)
        match last["content"]:
            case str(said) if said.strip():
                tagged: object = said + _TAG
            case [*parts, {"text": str(said)}] if said.strip():
                tagged = [*parts, *_parts([said + _TAG])]
            case _:
                raise ValueError("the last message says nothing that could be continued")
        text = self._render([*before, {**last, "content": tagged}], chat)
        head, found, rest = text.rpartition(_TAG.strip())
        if not found or said.strip() not in head:
            raise ValueError(
                "the model's chat template changes or leaves out the last message, so that nothing "
                "continues it; send its beginning as target_prefix"
            )
        is_kept = rest.startswith(" ")  # else the template cuts spaces off, as it would do here
        return head if is_kept else head.rstrip()

    def _forms_of_content(self) -> tuple[bool, bool]:
        """Return whether the template shows what somebody says as a text, and in parts.

        Both, if one part gives what a text does; a template that prints a list does not.
        """

        def shown(*contents: object) -> list[str]:
            messages = [[{"role": "user", "content": content}] for content in contents]
            try:
                return [self._render(one, Chat(())) for one in messages]
            except ValueError:
                return ["", ""]

        texts, parts = shown(*_PROBES), shown(*(_parts([one]) for one in _PROBES))
        takes_texts = texts[0] != texts[1] or parts[0] == parts[1]
        return takes_texts, parts[0] != parts[1] and (not takes_texts or texts == parts)

    def _messages(self, chat: Chat) -> Messages:
        return [
            {"role": self._role(one.role), "content": self._content(one.content), **one.more}
            for one in chat.messages
        ]

    def _role(self, role: str) -> str:
        """Return a role as the template has it: OpenAI has renamed "system", most templates not."""
        is_newer = role == "developer" and role not in self._form.template
        return "system" if is_newer else role

    def _content(self, said: str | tuple[str, ...] | None) -> object:
        if said is None:
            return None
        if isinstance(said, str):
            return said if self._takes_texts else _parts([said])
        return _parts(said) if self._takes_parts else "\n".join(said)

    def _render(self, messages: Messages, chat: Chat) -> str:
        """Return the text of messages, with all else as the conversation has it."""
        if self._problem is not None:
            what = f"{type(self._problem).__name__}: {self._problem}"
            raise ValueError(f"the model's chat template cannot be read: {what}") from self._problem
        self._turns = 0
        given = {**_NONE, **self._form.tokens, **self._form.variables, **chat.variables}
        given |= {"messages": messages, "add_generation_prompt": chat.add_generation_prompt}
        given |= {"tools": list(chat.tools)} if chat.tools else {}
        try:
            pieces, num_chars = [], 0
            for piece in self._template.generate(**given):
                pieces.append(piece)
                num_chars += len(piece)
                _check_chars(num_chars)
        except Exception as error:  # any error of the template's program
            what = f"{type(error).__name__}: {error}"[:1000]
            raise ValueError(f"the model's chat template refuses it: {what}") from error
        return "".join(pieces)

    def _compile(self, source: str) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # or constants are worked out here, without bounds
        )
        environment.filters |= {"tojson": _to_json, "turns": self._counted, "bounded": _bounded}
        environment.filters |= {"times": _times, "argument": _argument}
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        # Bounds first: what looks for variables works constants out.
        tree = _Bounds().visit(environment.parse(source))
        self._named = frozenset(find_undeclared_variables(tree))
        code = environment.compile(tree)
        return Template.from_code(environment, code, environment.globals)

    def _counted(self, items: Iterable[object]) -> Iterable[object]:
        """Return what a loop goes over; TemplateError where that is too much."""
        found = list(items)
        self._turns += len(found)
        if self._turns > _MAX_TURNS:
            raise UnboundedError(f"its loops have more than {_MAX_TURNS:,} turns")
        return found


class _Bounds(NodeTransformer):
    """Has every loop counted, and every text measured that is made of others."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count the turns of a loop."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "turns")
        return node

    def visit_Concat(self, node: nodes.Expr) -> nodes.Node:
        """Measure a result."""
        self.generic_visit(node)
        return _filtered(node, "bounded")

    visit_Add = visit_Concat

    def visit_Mul(self, node: nodes.Mul) -> nodes.Node:
        """Measure a result before it is there."""
        self.generic_visit(node)
        return nodes.Filter(node.left, "times", [node.right], [], None, None, lineno=node.lineno)

    def visit_Call(self, node: nodes.Call | nodes.Filter) -> nodes.Node:
        """Look at arguments, such as the width of `text.center(width)`."""
        self.generic_visit(node)
        node.args = [_filtered(one, "argument") for one in node.args]
        for one in node.kwargs:
            one.value = _filtered(one.value, "argument")
        return node

    visit_Filter = visit_Call

    def visit_Pow(self, node: nodes.Pow) -> nodes.Node:
        """Refuse powers, which may take hours."""
        raise UnboundedError("powers (**) are not supported")


class _Generation(Extension):
    """`{% generation %}`, which marks what the model writes, and changes no text."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Keep what is in the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> Any:
        return caller()


def _filtered(node: nodes.Node, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _parts(texts: Iterable[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _bounded(value: object) -> object:
    if isinstance(value, str | list | tuple):
        _check_chars(len(value))
    return value


def _times(one: Any, other: Any) -> object:
    for repeated, times in ((one, other), (other, one)):
        if isinstance(repeated, str | list | tuple) and isinstance(times, int):
            _check_chars(len(repeated) * times)
    if isinstance(one, int) and isinstance(other, int):
        _check_chars(one.bit_length() + other.bit_length())
    return one * other


def _argument(value: object) -> object:
    if isinstance(value, int):
        _check_chars(value)
    return value


def _check_chars(count: int) -> None:
    if count > _MAX_CHARS:
        raise UnboundedError(f"its text has more than {_MAX_CHARS:,} characters")


def _to_json(value: object, **options: Any) -> str:
    """Do as transformers does: no HTML, letters as they are."""
    known = ("ensure_ascii", "indent", "separators", "sort_keys")
    given = {"ensure_ascii": False} | {name: options[name] for name in known if name in options}
    return json.dumps(value, **given)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
