"""A worker on an obedient engine in a process of its own, to be killed by a test.

Prints its address, then the prompt of every request. One that says WAIT is never admitted; one that
says BLOCK blocks the event loop. Arguments are capabilities beside the usual ones.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator

from engine.requests.events import GenerationEvent
from engine.requests.request import GenerationRequest
from server.config import WorkerConfig
from server.worker.worker import Worker
from tests.fakes.engines import FakeGenerator


class _Telling(FakeGenerator):
    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        print(request.prompt, flush=True)
        if "BLOCK" in request.prompt:
            time.sleep(3600)
        if "WAIT" in request.prompt:
            await asyncio.Event().wait()
        async for event in super().generate(request):
            yield event


async def _main() -> None:
    engine = _Telling()
    engine.capabilities += tuple(sys.argv[1:])
    worker = Worker({"dates": engine}, WorkerConfig())
    print(await worker.start(), flush=True)
    await asyncio.Event().wait()


asyncio.run(_main())
