"""Requests whose answers are known, from a file that an earlier run has written, or a person."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import JsonValue

from loadtest.errors import LoadTestError
from loadtest.work.ask import Answer, Ask, Derived, Work


@dataclass(frozen=True)
class Expecting(Derived):
    """A work whose requests expect the answers that the same requests have in another one.

    An answer to a request without options holds whatever the options are.
    """

    answered: tuple[Ask, ...]

    def ask(self, index: int) -> Ask:
        """Return one request with its expected answer, if there is one."""
        return self._with_answer(self.work.ask(index))

    def next_turn(self, ask: Ask, answer: str) -> Ask | None:
        """Return what is asked behind an answer, with its own expected answer."""
        following = self.work.next_turn(ask, answer)
        return None if following is None else self._with_answer(following)

    def _with_answer(self, ask: Ask) -> Ask:
        known = self._known.get(_key(ask)) or self._known.get(_key(_plain(ask)))
        return replace(ask, expected=known or ask.expected)

    @cached_property
    def _known(self) -> Mapping[str, Answer]:
        return {_key(ask): ask.expected for ask in self.answered if ask.expected is not None}


def expecting(work: Work, answered: tuple[Ask, ...], name: str) -> Expecting:
    """Return the work with its answers; LoadTestError if the file `name` has none to it."""
    found = Expecting(work, answered)
    looked_at = range(work.num_different or 1)
    if not any(found.ask(index).expected for index in looked_at):
        raise LoadTestError(
            f"{name} has no answer to any of the requests; give the answers to the same prompts, "
            "as --answers writes them"
        )
    return found


def to_lines(answered: Iterable[tuple[Ask, Answer]]) -> str:
    """Return requests and their answers as lines of a file of requests; of equal ones the first."""
    lines: dict[str, str] = {}
    for ask, answer in answered:
        line = {**_request(ask), "answer": dict(answer)}
        lines.setdefault(_key(ask), json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines.values())


def _plain(ask: Ask) -> Ask:
    return replace(ask, options={})


def _key(ask: Ask) -> str:
    return json.dumps(_request(ask), sort_keys=True)


def _request(ask: Ask) -> dict[str, JsonValue]:
    """Return what makes a request another one, as a line of a file of requests has it."""
    line: dict[str, JsonValue] = {_prompt_name(ask): _prompt_value(ask)}
    if ask.method is not None:
        line["method"] = ask.method
    if ask.target is not None:
        line["target"] = list(ask.target) if isinstance(ask.target, tuple) else ask.target
    return {**line, "options": dict(ask.options)} if ask.options else line


def _prompt_name(ask: Ask) -> str:
    if isinstance(ask.prompt, Path):
        return "image"
    return "chat" if ask.is_chat else "prompt"


def _prompt_value(ask: Ask) -> JsonValue:
    if isinstance(ask.prompt, Path):
        return str(ask.prompt.resolve())
    return ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)  # type: ignore[arg-type]
