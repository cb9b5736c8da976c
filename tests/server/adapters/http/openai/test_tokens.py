"""Texts are turned into tokens and back over HTTP, as vLLM does it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from tokenweir import AsyncClient

from engine.config import EngineConfig
from engine.generation.async_engine import AsyncEngine
from engine.text.chat_format import ChatFormat
from server.config import WorkerConfig
from server.worker.worker import Worker
from tests.conftest import VOCAB_SIZE, ScriptedRunner
from tests.fakes.engines import FakePredictor
from tests.fakes.http_calls import Caller, http_of

CHAT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
CHAT += "{% if add_generation_prompt %}>{% endif %}"
BOS = VOCAB_SIZE - 2


@pytest.fixture
async def caller(
    scripted_engine: Callable[..., tuple[AsyncEngine, ScriptedRunner]],
) -> AsyncIterator[Caller]:
    """Serve a model over bytes beside one that has no tokens to tell."""
    row = np.zeros(VOCAB_SIZE, np.float32)
    config = EngineConfig(max_num_seqs=2)
    engine, _ = scripted_engine(
        lambda source, tokens: row, config=config, chat=ChatFormat(template=CHAT)
    )
    worker = Worker({"vectors": FakePredictor(), "bytes": engine}, WorkerConfig())
    address = await worker.start()
    try:
        async with AsyncClient(address, timeout=60) as client, http_of(client) as caller:
            yield caller
    finally:
        await worker.drain(0)


async def post(caller: Caller, path: str, **body: object) -> tuple[int, Any]:
    async with caller.session.post(f"{caller.url}/{path}", json=body) as found:
        return found.status, await found.json()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "a ü"}, "a ü"),
        ({"prompt": "a", "model": "bytes", "add_special_tokens": False}, "a"),
        ({"messages": [{"role": "u", "content": "b"}]}, "u:b;>"),
        ({"messages": [{"role": "u", "content": "b"}], "add_generation_prompt": False}, "u:b;"),
        ({"messages": [{"role": "u", "content": "b"}], "continue_final_message": True}, "u:b"),
    ],
)
async def test_a_text_and_its_tokens(body: dict[str, Any], text: str, caller: Caller):
    status, found = await post(caller, "tokenize", return_token_strs=True, **body)
    back = await post(caller, "detokenize", tokens=found["tokens"])

    assert status == 200
    assert found["tokens"] == [*text.encode()]
    assert (found["count"], found["max_model_len"]) == (len(text.encode()), 63)
    assert len(found["token_strs"]) == found["count"]
    assert back == (200, {"prompt": text})


async def test_special_tokens_have_their_names(caller: Caller):
    _, found = await post(caller, "detokenize", tokens=[BOS, *b"ab"])
    _, there = await post(caller, "tokenize", prompt="<s>ab")

    assert found == {"prompt": "<s>ab"}
    assert (there["tokens"], there["token_strs"]) == ([BOS, *b"ab"], None)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("tokenize", {}, 400, "prompt or messages: give one of them, a text or a conversation"),
        ("tokenize", {"prompt": ""}, 400, "prompt: is empty; give at least one token"),
        ("tokenize", {"prompt": "a", "model": "x"}, 404,
         "no model 'x' is served here; /v1/models lists them"),
        ("tokenize", {"prompt": "a", "model": "tags"}, 404,
         "no model 'tags' is served here; /v1/models lists them"),
        ("tokenize", {"messages": [{"role": "u"}]}, 400,
         "messages[0].content is missing; a message has role and content"),
        ("tokenize", {"prompt": "a" * 99}, 400,
         "prompt: 99 tokens are more than 63, the longest prompt of this model; shorten it"),
        ("detokenize", {"tokens": [5, 999]}, 400,
         f"tokens: 999 is outside the vocabulary, 0 to {VOCAB_SIZE - 1}"),
        ("detokenize", {"tokens": []}, 400,
         "tokens: List should have at least 1 item after validation, not 0"),
    ],
)  # fmt: skip
async def test_what_has_no_tokens_is_refused(
    path: str, body: dict[str, Any], status: int, said: str, caller: Caller
):
    found = await post(caller, path, **body)

    assert (found[0], found[1]["error"]["message"]) == (status, said)
