"""CTranslate2 behind a minimal gRPC server: what waits is translated as one batch.

CTranslate2 itself makes batches of what is in one call, and runs calls beside each other. So
requests are gathered while the calls before them run, and go into the next call together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
from tokenweir.v1 import generation_service_pb2 as pb

from loadtest.lab.peers.servers.launch import Launch, python_server
from loadtest.lab.peers.servers.token_stream import stream
from loadtest.lab.peers.worker import LoadOptions

_SERVICE = "tokenweir.v1.GenerationService"
_PAUSE = 0.005  # seconds without another request, after which a batch begins


@dataclass
class Waiting:
    """A request, and its tokens as they come; None is its end."""

    prompt: Sequence[int]
    num_new_tokens: int
    tokens: asyncio.Queue[int | Exception | None] = field(default_factory=asyncio.Queue)


Told = Callable[[int, int], None]  # index of the prompt, and its next token
# Runs prompts as one batch, in any thread, and tells every token.
RunBatch = Callable[[Sequence[Sequence[int]], int, Told], None]


class Batches:
    """Gathers requests into batches, of which several may run at once."""

    def __init__(self, run: RunBatch, max_batch: int, pause: float = _PAUSE) -> None:
        self._run, self._max_batch, self._pause = run, max_batch, pause
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._turn = asyncio.Lock()

    async def generate(self, prompt: Sequence[int], num_new: int) -> AsyncIterator[Sequence[int]]:
        """Yield the tokens of a request as its batch brings them."""
        waiting = Waiting(prompt, num_new)
        self._queue.put_nowait(waiting)
        while (token := await waiting.tokens.get()) is not None:
            if isinstance(token, Exception):
                raise token
            yield (token,)

    async def run_forever(self) -> None:
        """Run one batch after the other; several tasks may do so beside each other."""
        while True:
            async with self._turn:  # one gathers at a time
                batch = await self._gather()
            await self._answer(batch)

    async def _gather(self) -> list[Waiting]:
        batch = [await self._queue.get()]
        with suppress(TimeoutError):
            while len(batch) < self._max_batch:
                async with asyncio.timeout(self._pause):
                    batch.append(await self._queue.get())
        return batch

    async def _answer(self, batch: list[Waiting]) -> None:
        loop = asyncio.get_running_loop()

        def tell(index: int, token: int) -> None:
            loop.call_soon_threadsafe(batch[index].tokens.put_nowait, token)

        end: Exception | None = None
        lengths = {waiting.num_new_tokens for waiting in batch}
        try:
            if len(lengths) > 1:
                raise ValueError("all requests of a batch are to have the same length")
            prompts = [waiting.prompt for waiting in batch]
            await asyncio.to_thread(self._run, prompts, lengths.pop(), tell)
        except Exception as error:
            end = error
        for waiting in batch:
            waiting.tokens.put_nowait(end)


async def serve(batches: Batches, num_parallel: int, port: int, until: Awaitable[object]) -> None:
    """Answer calls, with so many batches at once, until something has happened."""

    async def answer(
        request: pb.GenerateStreamRequest, context: object
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        async for message in stream(request, batches.generate):
            yield message

    handler = grpc.unary_stream_rpc_method_handler(
        answer,
        pb.GenerateStreamRequest.FromString,
        pb.GenerateStreamResponse.SerializeToString,
    )
    server = grpc.aio.server()
    handlers = grpc.method_handlers_generic_handler(_SERVICE, {"GenerateStream": handler})
    server.add_generic_rpc_handlers((handlers,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    runners = [asyncio.create_task(batches.run_forever()) for _ in range(num_parallel)]
    try:
        await until
    finally:
        for runner in runners:
            runner.cancel()
        await server.stop(grace=None)


def launch(options: LoadOptions, port: int) -> Launch:
    """Return the command that runs `main` here; ImportError without CTranslate2."""
    from importlib.metadata import version

    import ctranslate2  # noqa: F401  # is it there?

    versions = {name: version(name) for name in ("ctranslate2", "grpcio")}
    return Launch(python_server(__name__, options, port), f"127.0.0.1:{port}", versions)


def main(options: str, port: str) -> None:
    """Serve until the process is ended."""
    from loadtest.lab.peers.adapters.ctranslate import CTranslate2Adapter

    asked = LoadOptions.of(options)
    adapter = CTranslate2Adapter(asked)
    num_parallel = asked.setting.get("inter_threads", 1)
    batches = Batches(adapter.stream, -(-asked.max_concurrency // num_parallel))
    asyncio.run(serve(batches, num_parallel, int(port), asyncio.Event().wait()))
