"""The stages of the study of overhead: the same is asked of one part more each time."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import grpc
from grpc import aio
from tokenweir import AsyncClient

from engine.generation.async_engine import AsyncEngine
from engine.generation.core import EngineCore
from engine.requests.events import TextDelta
from engine.requests.request import Deltas, GenerationRequest, SamplingParams
from engine.scheduling.sequence import TokenRequest
from loadtest.errors import LoadTestError
from loadtest.lab.stand_in.model import (
    NAME,
    FullSteps,
    StandInModel,
    stand_in_config,
    stand_in_core,
    stand_in_engine,
    step_time,
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
    full_steps: FullSteps  # the model's meanwhile


def _processor_seconds(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)  # the kernel has a clock for every process


Ask = Callable[[Work], Awaitable[int]]  # returns the number of messages
Do = Callable[[Work], Awaitable[Used]]
Stage = Callable[[int, str], AbstractAsyncContextManager[Do]]  # slots, what a step takes


class Part(NamedTuple):
    """A process of the server."""

    process: subprocess.Popen[str]
    address: str
    engine: int | None  # the number of the process of its engine, if that has one for itself

    def full_steps(self) -> FullSteps:
        """Return those of its model since this was asked last."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return FullSteps(*json.loads(_line(self.process)))

    def processor_seconds(self) -> float:
        """Return what it has used so far."""
        return _processor_seconds(self.process.pid)


@asynccontextmanager
async def core_alone(num_slots: int, step: str) -> AsyncIterator[Do]:
    """Let the inner loop run by itself, all in one thread."""
    model = StandInModel(num_slots, step_time(step))
    core, keys = stand_in_core(stand_in_config(num_slots), model), count()

    async def ask(work: Work) -> int:
        for _ in range(0, work.num_requests, work.num_streams):
            for key in [next(keys) for _ in range(work.num_streams)]:
                core.scheduler.add(_token_request(key, work))
            _run(core)
        return work.num_requests * work.num_tokens

    yield _measured(ask, {"engine": time.process_time}, model.log.take)


@asynccontextmanager
async def engine_alone(
    num_slots: int, step: str, *, own_process: bool = False
) -> AsyncIterator[Do]:
    """Let streams be read from the engine in this process, or from its own."""
    names = count()
    with tempfile.TemporaryDirectory() as directory:
        made = stand_in_engine(num_slots, step, Path(directory), own_process=own_process)

        async def ask(work: Work) -> int:
            return await _in_streams(
                work, lambda: _read_engine(made.engine, f"{next(names)}", work)
            )

        processes = {"engine": time.process_time}
        if made.pid is not None:
            processes = {"streams": time.process_time, **_engine_process(made.pid)}
        await made.engine.start()
        yield _measured(ask, processes, made.log.take)
        await made.engine.stop()


@asynccontextmanager
async def behind_worker(num_slots: int, step: str, *, worker: str = "worker") -> AsyncIterator[Do]:
    """Let a client in this process ask a worker."""
    with part(worker, num_slots, step) as asked:
        async with _client(asked.address) as ask:
            yield _measured(ask, _processes(asked), asked.full_steps)


@asynccontextmanager
async def behind_gateway(
    num_slots: int, step: str, *, worker: str = "worker", gateway: str = "gateway"
) -> AsyncIterator[Do]:
    """Let a client in this process ask a gateway, or a proxy, and that a worker."""
    with part(worker, num_slots, step) as asked:
        with part(gateway, num_slots, asked.address) as relaying:
            async with _client(relaying.address) as ask:
                yield _measured(ask, _processes(asked, relaying), asked.full_steps)


@asynccontextmanager
async def behind_doors(num_slots: int, step: str) -> AsyncIterator[Do]:
    """Let a client ask a gateway by TLS, with a token that has quotas."""
    with tempfile.TemporaryDirectory() as folder, part("worker", num_slots, step) as worker:
        with part("gateway", num_slots, worker.address, folder) as gateway:
            async with _client_of_doors(Path(folder), gateway.address) as client:
                ask = partial(_ask, client)
                yield _measured(ask, _processes(worker, gateway), worker.full_steps)


def _client_of_doors(folder: Path, address: str) -> AsyncClient:
    """Return a client by TLS, with the token that the gateway has written for it."""
    found = json.loads((folder / "client.json").read_text())
    credentials = grpc.ssl_channel_credentials((folder / "cert.pem").read_bytes())
    options = (("grpc.ssl_target_name_override", found["host"]),)
    channel = aio.secure_channel(address, credentials, options=options)
    return AsyncClient(channel=channel, timeout=600, token=found["token"])


# The engine of a worker has a thread of it, or a process.
SERVED: dict[str, Stage] = {
    "worker": behind_worker,
    "worker-process": partial(behind_worker, worker="worker-process"),
    "proxy": partial(behind_gateway, gateway="proxy"),
    "gateway": behind_gateway,
    "gateway-process": partial(behind_gateway, worker="worker-process"),
    "doors": behind_doors,
}
STAGES: dict[str, Stage] = {
    "core": core_alone,
    "engine": engine_alone,
    "engine-process": partial(engine_alone, own_process=True),
    **SERVED,
}


@contextmanager
def part(what: str, num_slots: int, *arguments: str) -> Iterator[Part]:
    """Run a part of the server in a process, until the end of the block."""
    command = [sys.executable, "-m", "loadtest.lab.stand_in.process", what]
    process = subprocess.Popen(
        [*command, str(num_slots), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address, *engine = _line(process).split()
        yield Part(process, address, int(engine[0]) if engine else None)
    finally:
        process.communicate()  # it ends with its input


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if line := process.stdout.readline():
        return line
    raise LoadTestError("a process of the server has ended; what it wrote says why")


def _measured(
    ask: Ask, processes: Mapping[str, Callable[[], float]], full_steps: Callable[[], FullSteps]
) -> Do:
    async def do(work: Work) -> Used:
        full_steps()  # those of others are forgotten
        before = {name: seconds() for name, seconds in processes.items()}
        num_messages = await ask(work)
        used = {name: seconds() - before[name] for name, seconds in processes.items()}
        return Used(work.num_requests * work.num_tokens, num_messages, used, full_steps())

    return do


@asynccontextmanager
async def _client(address: str) -> AsyncIterator[Ask]:
    async with AsyncClient(address, timeout=600, max_attempts=1) as client:
        yield partial(_ask, client)


async def _ask(client: AsyncClient, work: Work) -> int:
    return await _in_streams(work, lambda: _read_client(client, work))


def _processes(worker: Part, gateway: Part | None = None) -> Mapping[str, Callable[[], float]]:
    return {
        "client": time.process_time,
        **({"gateway": gateway.processor_seconds} if gateway else {}),
        "worker": worker.processor_seconds,
        **(_engine_process(worker.engine) if worker.engine else {}),
    }


def _engine_process(pid: int) -> dict[str, Callable[[], float]]:
    return {"engine": lambda: _processor_seconds(pid)}


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


def _run(core: EngineCore) -> None:
    while core.has_work:
        core.step()
