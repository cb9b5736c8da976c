"""The stages of the study of overhead: the same is asked of one part more each time."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from tokenweir import AsyncClient

from engine.generation.async_engine import AsyncEngine
from engine.requests.events import TextDelta
from engine.requests.request import Deltas, GenerationRequest, SamplingParams
from engine.scheduling.sequence import TokenRequest
from loadtest.lab.line_process import LineProcess
from loadtest.lab.stand_in.model import (
    NAME,
    StandInModel,
    stand_in_config,
    stand_in_core,
    stand_in_engine,
)

_PROMPT = "What does a token cost, by itself?"


class Work(NamedTuple):
    """So many requests, so many of them at once."""

    num_streams: int
    num_requests: int
    num_tokens: int  # in every output
    tokens_per_message: int = 1


class Used(NamedTuple):
    """Resources that some work has taken."""

    num_tokens: int
    num_messages: int
    processor: Mapping[str, float]  # seconds, by process


Ask = Callable[[Work], Awaitable[int]]  # returns the number of messages
Do = Callable[[Work], Awaitable[Used]]
Stage = Callable[[int, float], AbstractAsyncContextManager[Do]]  # slots, seconds a row
Clocks = Mapping[str, Callable[[], float]]  # processor time of each process so far, in seconds


@asynccontextmanager
async def core_alone(num_slots: int, seconds_a_row: float) -> AsyncIterator[Do]:
    """Run the inner loop by itself, in one thread."""
    model = StandInModel(num_slots, seconds_a_row)
    core, keys = stand_in_core(stand_in_config(num_slots), model), count()

    async def ask(work: Work) -> int:
        for _ in range(0, work.num_requests, work.num_streams):
            for key in [next(keys) for _ in range(work.num_streams)]:
                core.scheduler.add(_token_request(key, work))
            while core.has_work:
                core.step()
        return work.num_requests * work.num_tokens

    yield _measured(ask, {"engine": time.process_time})


@asynccontextmanager
async def engine_alone(num_slots: int, seconds_a_row: float) -> AsyncIterator[Do]:
    """Read streams from the engine in this process."""
    names = count()
    with tempfile.TemporaryDirectory() as directory:
        engine = stand_in_engine(num_slots, seconds_a_row, Path(directory))

        async def ask(work: Work) -> int:
            return await _in_streams(work, lambda: _read_engine(engine, f"{next(names)}", work))

        await engine.start()
        yield _measured(ask, {"engine": time.process_time})
        await engine.stop()


@asynccontextmanager
async def served(num_slots: int, seconds_a_row: float, *, last: str) -> AsyncIterator[Do]:
    """Call a worker, or the gateway in front of it, from this process."""
    with ExitStack() as stack:
        parts = start_parts(stack, last, num_slots, f"{seconds_a_row}")
        clocks = {name: partial(_processor_seconds, part.pid) for name, part in parts.items()}
        address = parts[last].address
        async with AsyncClient(address, timeout=600, max_attempts=1) as client:

            async def ask(work: Work) -> int:
                return await _in_streams(work, lambda: _read_client(client, work))

            yield _measured(ask, {"client": time.process_time, **clocks})


SERVED = ("worker", "gateway")
STAGES: dict[str, Stage] = {
    "core": core_alone,
    "engine": engine_alone,
    **{last: partial(served, last=last) for last in SERVED},
}


class Part(NamedTuple):
    """A process of the server."""

    address: str
    pid: int


def start_parts(stack: ExitStack, last: str, num_slots: int, model: str) -> dict[str, Part]:
    """Run a worker, and what is in front of it up to the last, until the end of a stack."""
    parts: dict[str, Part] = {}
    argument = model
    for what in SERVED[: SERVED.index(last) + 1]:
        module = "loadtest.lab.stand_in.process"
        command = [sys.executable, "-m", module, what, f"{num_slots}", argument]
        process = stack.enter_context(LineProcess(command))
        argument = process.read()
        parts[what] = Part(argument, process.pid)
    return parts


def _processor_seconds(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)  # the kernel has a clock for every process


def _measured(ask: Ask, clocks: Clocks) -> Do:
    async def do(work: Work) -> Used:
        before = {name: seconds() for name, seconds in clocks.items()}
        num_messages = await ask(work)
        used = {name: seconds() - before[name] for name, seconds in clocks.items()}
        return Used(work.num_requests * work.num_tokens, num_messages, used)

    return do


async def _in_streams(work: Work, read: Callable[[], Awaitable[int]]) -> int:
    """Make the requests of some work, and return how many messages came in all."""
    left = iter(range(work.num_requests))

    async def stream() -> int:
        return sum([await read() for _ in left])

    return sum(await asyncio.gather(*(stream() for _ in range(work.num_streams))))


async def _read_engine(engine: AsyncEngine, name: str, work: Work) -> int:
    params = SamplingParams(max_new_tokens=work.num_tokens)
    deltas = Deltas(work.tokens_per_message)
    events = engine.generate(GenerationRequest(name, _PROMPT, params, deltas=deltas))
    return sum([isinstance(event, TextDelta) async for event in events])


async def _read_client(client: AsyncClient, work: Work) -> int:
    messages = client.stream_events(
        NAME,
        _PROMPT,
        max_new_tokens=work.num_tokens,
        tokens_per_message=work.tokens_per_message,
    )
    return sum([message.HasField("delta") async for message in messages])


def _token_request(key: int, work: Work) -> TokenRequest:
    return TokenRequest(
        key=key,
        request_id=str(key),
        prompt_ids=tuple(_PROMPT.encode()),
        params=SamplingParams(max_new_tokens=work.num_tokens),
        seed=0,
        arrival=time.monotonic(),
        deltas=Deltas(work.tokens_per_message),
    )
