"""Streams whose right answers are known: greedy and drawn, by a constraint, with alternatives."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tokenweir import (
    AsyncClient,
    BrokenStream,
    DeadlineExceeded,
    GeneratedSequence,
    Generation,
    TokenweirClientError,
)

from loadtest.lab.chaos.answers import Tally

_TIMEOUT = 120.0  # seconds, after which a stream hangs
_PAUSE = 0.05  # seconds after a failure: nobody asks a server that is not there without end


@dataclass(frozen=True)
class Case:
    """A request and its answer."""

    prompt: str
    options: dict[str, Any]
    expected: tuple[GeneratedSequence, ...]


def kinds(num_tokens: int) -> tuple[dict[str, Any], ...]:
    """Return the options of every kind of request, for answers of so many tokens."""
    drawn = {"temperature": 1.5, "seed": 11}
    both: dict[str, Any] = {"max_new_tokens": num_tokens, "logprobs": 0, "ignore_eos": True}
    return (
        both,
        both | drawn,
        both | drawn | {"logprobs": 3, "top_k": 20},
        both | {"repetition_penalty": 1.3},
        {"max_new_tokens": num_tokens, "logprobs": 0, "beam": 3},
        {"max_new_tokens": num_tokens, "logprobs": 0, "regex": "[a-z0-9 ]{4,}"} | drawn,
    )


async def cases(client: AsyncClient, model: str, prompts: Sequence[str], n: int) -> list[Case]:
    """Ask for the answers while all is well, in calls that are not streamed."""
    asked = list(itertools.product(prompts, kinds(n)))

    async def ask(prompt: str, options: dict[str, Any]) -> Case:
        answer = await client.generate(model, prompt, **options)
        return Case(prompt, options, answer.sequences)

    return [await ask(*one) for one in asked]


@dataclass
class Load:
    """Clients that ask one thing after the other; what came of it, and when."""

    client: AsyncClient
    model: str
    cases: list[Case]
    tally: Tally = field(default_factory=Tally)
    wrong: list[str] = field(default_factory=list)  # wrong answers, for the log
    ends: list[tuple[float, float]] = field(default_factory=list)  # begin, end of right ones
    failures: list[tuple[float, str]] = field(default_factory=list)  # when, and what was said

    @asynccontextmanager
    async def going_on(self, concurrency: int) -> AsyncIterator[None]:
        """Ask while the block runs; then wait for all answers."""
        self._is_over = False
        askers = [asyncio.create_task(self._ask_on(i)) for i in range(concurrency)]
        try:
            yield
        finally:
            self._is_over = True
            await asyncio.gather(*askers)

    async def _ask_on(self, first: int) -> None:
        for case in itertools.islice(itertools.cycle(self.cases), first * 5, None):
            if self._is_over:
                return
            began, pieces = time.monotonic(), list[str]()
            try:
                stream = self.client.stream(
                    self.model, case.prompt, timeout=_TIMEOUT, **case.options
                )
                async for piece in stream:
                    pieces.append(piece)
            except DeadlineExceeded:
                self.tally.hung += 1
            except BrokenStream as error:
                self.tally.broken += 1
                self.wrong.append(f"broken: {case.prompt!r} {case.options}: {error}")
            except TokenweirClientError as error:
                self._note_failure(error, time.monotonic() - began, has_begun=bool(pieces))
                await asyncio.sleep(_PAUSE)
            else:
                self._judge(case, "".join(pieces), stream.result, began)

    def _note_failure(self, error: TokenweirClientError, took: float, *, has_begun: bool) -> None:
        where = "amid its text" if has_begun else "before its text"
        self.tally.failed[" ".join(filter(None, (error.code.name, error.reason, where)))] += 1
        self.failures.append((time.monotonic(), f"{where}, after {took:.0f} s: {error}"))

    def _judge(self, case: Case, text: str, result: Generation, began: float) -> None:
        (got,), (expected,) = result.sequences, case.expected
        if text != expected.text:  # the streamed text counts, whatever the result says
            got = GeneratedSequence(**{**vars(got), "text": text})
        if (found := self.tally.judge(got, expected)) == "right":
            self.ends.append((began, time.monotonic()))
        else:
            self.wrong.append(f"{found}: {case.prompt!r} {case.options}: {text!r}")

    def failures_between(self, begin: float, end: float) -> tuple[str, ...]:
        """Return what those were told that failed in this time."""
        return tuple(said for when, said in self.failures if begin <= when < end)

    def first_answer_after(self, harm: float) -> float | None:
        """Return the seconds to the end of the first right answer to a request sent after it."""
        return min((end - harm for began, end in self.ends if began >= harm), default=None)
