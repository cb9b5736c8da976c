"""One request of a load test: what is asked, by which call, with which options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, cast

from pydantic import JsonValue

Method = Literal["generate", "score", "classify", "label", "embed"]


Said = Mapping[str, str]  # role and content of what somebody says in a conversation
Prompt = (
    str | tuple[int, ...] | tuple[Said, ...] | Path
)  # text, token ids, a conversation, an image
Answer = Mapping[str, JsonValue]  # as `loadtest.answers` compares it


@dataclass(frozen=True)
class Ask:
    """A request, and what follows it in its session."""

    prompt: Prompt
    method: Method | None = None  # None: the first that the model has
    target: str | tuple[int, ...] | None = None  # for a score
    options: Mapping[str, JsonValue] = field(default_factory=dict)  # for the client's call
    kind: str = ""  # its name in the tables
    at: float | None = None  # seconds from the start, in a trace
    turns: tuple[str, ...] = ()  # the prompts behind it: "{answer}" is the last answer
    expected: Answer | None = None  # fields that its answer is to have

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a conversation."""
        prompt = self.prompt
        return isinstance(prompt, tuple) and bool(prompt) and isinstance(prompt[0], Mapping)

    def next_turn(self, answer: str) -> Ask | None:
        """Return what is asked behind an answer; None at the end of the session.

        A conversation grows by the answer and what is said next; a text is replaced.
        """
        if not self.turns:
            return None
        said = self.turns[0].replace("{answer}", answer)
        prompt: Prompt = said
        if self.is_chat:
            turn: tuple[Said, ...] = (
                {"role": "assistant", "content": answer},
                {"role": "user", "content": said},
            )
            prompt = (*cast(tuple[Said, ...], self.prompt), *turn)
        return replace(self, prompt=prompt, turns=self.turns[1:], expected=None)


class Work(Protocol):
    """The requests of a load test, each the same for the same index."""

    @property
    def title(self) -> str:
        """In words, for the report."""
        ...

    @property
    def num_different(self) -> int | None:
        """Requests until they repeat; None: they never do."""
        ...

    @property
    def times(self) -> tuple[float, ...]:
        """Seconds from the start at which requests are due, of a trace; else nothing."""
        ...

    def ask(self, index: int) -> Ask:
        """Return one request."""
        ...

    def next_turn(self, ask: Ask, answer: str) -> Ask | None:
        """Return what is asked behind an answer; None at the end of the session."""
        ...


@dataclass(frozen=True)
class InTurn:
    """Requests that are used in turn."""

    title: str
    asks: tuple[Ask, ...]

    @property
    def num_different(self) -> int:
        return len(self.asks)

    @property
    def times(self) -> tuple[float, ...]:
        known = tuple(ask.at for ask in self.asks if ask.at is not None)
        return known if len(known) == len(self.asks) else ()

    def ask(self, index: int) -> Ask:
        """Return the request of an index, of any size."""
        return self.asks[index % len(self.asks)]

    def next_turn(self, ask: Ask, answer: str) -> Ask | None:
        """Return what is asked behind an answer."""
        return ask.next_turn(answer)


@dataclass(frozen=True)
class Derived:
    """A work that follows another one, but for an `ask` of its own."""

    work: Work

    @property
    def title(self) -> str:
        return self.work.title

    @property
    def num_different(self) -> int | None:
        return self.work.num_different

    @property
    def times(self) -> tuple[float, ...]:
        return self.work.times

    def next_turn(self, ask: Ask, answer: str) -> Ask | None:
        """Return what the other work asks behind an answer."""
        return self.work.next_turn(ask, answer)


def texts(prompts: tuple[str, ...], **options: JsonValue) -> InTurn:
    """Return texts that are asked in turn, all with the same options."""
    title = f"{len(prompts)} prompts in turn"
    return InTurn(title, tuple(Ask(prompt, options=options) for prompt in prompts))
