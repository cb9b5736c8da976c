"""A worker at the end of a wire, whose calls are answered by a function of the test."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from server.calls.call_server import CallServer, ServerCall
from server.wire import protocol
from server.wire.bearer import Bearer, BearerCall
from server.wire.work_pb2 import Models, State

Behavior = Callable[[BearerCall], Awaitable[None]]


class WiredWorker:
    """It answers by `behavior`; says that it serves, and no model."""

    def __init__(self, behavior: Behavior | None = None) -> None:
        self.behavior = behavior
        self.bearers: list[Bearer] = []
        self.cancelled = asyncio.Event()  # an answer was
        self.state = State(serving=True, models=Models())
        self._loop = asyncio.get_running_loop()
        self.server = CallServer(self._arrived, (("grpc.max_receive_message_length", 1 << 20),))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def carrying(self, call: ServerCall) -> Bearer:
        """Return what takes the calls of a gateway."""
        return Bearer(call, self.answer, self.told)

    def _arrived(self, call: ServerCall) -> None:
        self._loop.call_soon_threadsafe(self._begin, call)

    def _begin(self, call: ServerCall) -> None:
        assert call.method == protocol.METHOD
        self.bearers.append(self.carrying(call))
        call.answer(self.bearers[-1].carry())

    def told(self) -> State:
        state = State()
        state.CopyFrom(self.state)
        return state

    async def answer(self, call: BearerCall) -> None:
        assert self.behavior is not None
        try:
            await self.behavior(call)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@asynccontextmanager
async def scripted_worker(behavior: Any) -> AsyncIterator[str]:
    """Answer calls of clients by a coroutine, or an asynchronous generator, of a request."""

    async def answer(call: BearerCall) -> None:
        request = await call.read()
        if not call.method.startswith("/tokenweir.v1."):  # the gateway's own
            await call.finish(b"")
        elif inspect.isasyncgenfunction(behavior):
            async for message in behavior(request, call):
                await call.write(message)
            await call.finish()
        else:
            await call.finish(await behavior(request, call))

    worker = WiredWorker(answer)
    try:
        yield worker.address
    finally:
        await worker.server.stop(0)
