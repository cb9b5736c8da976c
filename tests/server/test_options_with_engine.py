"""Every option of a generation from the client through a real worker to a real engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.package import Package
from engine.tokenizer import Tokenizer
from server.client import AsyncClient, DeadlineExceeded
from server.config import WorkerConfig
from server.worker import Worker

VOCAB_SIZE, EOS = 258, 257  # the other ids are bytes, then the start
MODEL = "m"
CONFIG = EngineConfig(max_num_seqs=4)

Script = Callable[[list[int], list[int]], np.ndarray]
Serving = Callable[..., AbstractAsyncContextManager[AsyncClient]]


@pytest.fixture
def clock() -> Callable[[], float]:
    """The clock of the deadlines that the server gives to the engine."""
    return time.monotonic


@pytest.fixture
def serving(
    make_core: Callable[..., tuple[EngineCore, Any]],
    make_package: Callable[..., Package],
    byte_tokenizer: Tokenizer,
) -> Serving:
    """Serve a scripted model, and yield a client of it."""

    @asynccontextmanager
    async def serve(
        script: Script, step_seconds: float = 0.0, **shape: int
    ) -> AsyncIterator[AsyncClient]:
        core, runner = make_core(script, config=CONFIG, **shape)
        runner.before_step = lambda: time.sleep(step_seconds)
        engine = AsyncEngine(make_package(**shape), core, byte_tokenizer, CONFIG)
        worker = Worker({MODEL: engine}, WorkerConfig())
        address = await worker.start()
        try:
            async with AsyncClient(address, timeout=20) as client:
                yield client
        finally:
            await worker.drain(0)

    return serve


def always(**logits: float) -> Callable[[list[int], list[int]], np.ndarray]:
    """Make a script that gives the same logits at every position: by letter, else -20."""
    row = np.full(VOCAB_SIZE, -20.0, np.float32)
    for letter, logit in logits.items():
        row[ord(letter)] = logit
    return lambda source, tokens: row


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "aaaaaa"),
        ({"banned_tokens": [ord("a")]}, "bbbbbb"),
        ({"logit_bias": {ord("c"): 5.0}}, "cccccc"),
        ({"presence_penalty": 1.5}, "abcaaa"),
        ({"frequency_penalty": 1.0}, "abacba"),
        ({"no_repeat_ngram": 2}, "aabaca"),
        ({"repetition_penalty": 1.2}, "abaaaa"),
    ],
)
async def test_controls(options: dict[str, object], text: str, serving: Serving) -> None:
    async with serving(always(a=4.0, b=3.5, c=2.8)) as client:
        answer = await client.generate(MODEL, ">", max_new_tokens=6, **options)

    assert answer.text == text


async def test_typical_p(serving: Serving) -> None:
    others = {chr(ord("A") + i): 0.0 for i in range(26)}
    # Likelier than any other, and not typical.
    async with serving(always(a=2.0, **others)) as client:
        all_tokens = await client.generate(MODEL, ">", max_new_tokens=40, seed=1)
        typical = await client.generate(MODEL, ">", max_new_tokens=40, seed=1, typical_p=0.5)

    assert "a" in all_tokens.text
    assert "a" not in typical.text


async def test_priority_and_tenant(serving: Serving) -> None:
    async with serving(always(a=4.0)) as client:
        answer = await client.generate(MODEL, ">", max_new_tokens=1, priority=-1, tenant="team")

    assert answer.text == "a"


async def test_allow_partial(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the engine only: a client's own deadline would race with the answer.
    monkeypatch.setattr("server.service._deadline", lambda context: time.monotonic() + 0.6)

    async with serving(always(a=4.0), step_seconds=0.03) as client:
        answer = await client.generate(MODEL, ">", allow_partial=True)
        with pytest.raises(DeadlineExceeded):
            await client.generate(MODEL, ">")

    assert answer.finish_reason == "deadline"
    assert answer.text and set(answer.text) == {"a"}


async def test_determinism_is_what_was_asked_for(serving: Serving) -> None:
    async with serving(always(a=4.0)) as client:
        answers = [
            await client.generate(MODEL, ">", max_new_tokens=1, batch_invariant=asked)
            for asked in (None, True, False)
        ]

    assert [answer.provenance.determinism for answer in answers] == [
        "batch_invariant",
        "batch_invariant",
        "best_effort",
    ]
