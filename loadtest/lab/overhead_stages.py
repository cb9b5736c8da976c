"""The stages of the study of overhead: a worker, and a gateway in front of one."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

from tokenweir import AsyncClient

from loadtest.lab.line_process import LineProcess
from loadtest.lab.stand_in.model import NAME

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


Do = Callable[[Work], Awaitable[Used]]
STAGES = ("worker", "gateway")


@asynccontextmanager
async def served(stage: str, num_slots: int, seconds_a_row: float) -> AsyncIterator[Do]:
    """Call a worker, or the gateway in front of it, from this process."""
    with ExitStack() as stack:
        parts = start_parts(stack, stage, num_slots, f"{seconds_a_row}")
        pids = {"client": os.getpid(), **{name: part.pid for name, part in parts.items()}}
        async with AsyncClient(parts[stage].address, timeout=600, max_attempts=1) as client:

            async def do(work: Work) -> Used:
                before = {name: _processor_seconds(pid) for name, pid in pids.items()}
                num_messages = await _in_streams(client, work)
                used = {name: _processor_seconds(pid) - before[name] for name, pid in pids.items()}
                return Used(work.num_requests * work.num_tokens, num_messages, used)

            yield do


class Part(NamedTuple):
    """A process of the server."""

    address: str
    pid: int


def start_parts(stack: ExitStack, last: str, num_slots: int, model: str) -> dict[str, Part]:
    """Run a worker, and what is in front of it up to the last, until the end of a stack."""
    parts: dict[str, Part] = {}
    argument = model
    for what in STAGES[: STAGES.index(last) + 1]:
        module = "loadtest.lab.stand_in.process"
        command = [sys.executable, "-m", module, what, f"{num_slots}", argument]
        process = stack.enter_context(LineProcess(command))
        argument = process.read()
        parts[what] = Part(argument, process.pid)
    return parts


def _processor_seconds(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)  # the kernel has a clock for every process


async def _in_streams(client: AsyncClient, work: Work) -> int:
    """Make the requests of some work, and return how many messages came in all."""
    left = iter(range(work.num_requests))

    async def stream() -> int:
        return sum([await _read(client, work) for _ in left])

    return sum(await asyncio.gather(*(stream() for _ in range(work.num_streams))))


async def _read(client: AsyncClient, work: Work) -> int:
    messages = client.stream_events(
        NAME,
        _PROMPT,
        max_new_tokens=work.num_tokens,
        tokens_per_message=work.tokens_per_message,
    )
    return sum([message.HasField("delta") async for message in messages])
