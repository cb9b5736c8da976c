"""A scripted chat model behind the HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tokenweir import AsyncClient

from engine.config import EngineConfig
from engine.generation.async_engine import AsyncEngine
from engine.text.chat_format import ChatFormat, ToolFormat
from server.config import WorkerConfig
from server.worker.worker import Worker
from tests.conftest import Script, ScriptedRunner
from tests.fakes.http_calls import Caller, http_of

if TYPE_CHECKING:  # it takes seconds, in every process that collects these tests
    import openai

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}>"
TEMPLATE = """{{ tools | tojson if tools }}{% for m in messages %}
{{ m.role }}{{ m.tool_call_id }}{{ m.name }}:{{ m.content if m.content is not none }}
{{- m.tool_calls | tojson if m.tool_calls }};
{%- endfor %}>"""

Serving = Callable[..., AbstractAsyncContextManager[Caller]]


@pytest.fixture
def serving(scripted_engine: Callable[..., tuple[AsyncEngine, ScriptedRunner]]) -> Serving:
    """Serve a scripted model that writes calls in a format over HTTP."""

    @asynccontextmanager
    async def serve(script: Script, form: ToolFormat | None, template: str = TEMPLATE) -> Any:
        chat = ChatFormat(template=template, tool_format=form)
        engine, _ = scripted_engine(
            script, config=EngineConfig(max_num_seqs=4), chat=chat, max_len=1500
        )
        worker = Worker({"m": engine}, WorkerConfig())
        address = await worker.start()
        try:
            async with AsyncClient(address, timeout=60) as client, http_of(client) as caller:
                yield caller
        finally:
            await worker.drain(0)

    return serve


@asynccontextmanager
async def client_of(caller: Caller) -> AsyncIterator[openai.AsyncOpenAI]:
    import openai

    async with openai.AsyncOpenAI(
        base_url=f"{caller.url}/v1", api_key="any", max_retries=0
    ) as client:
        yield client
