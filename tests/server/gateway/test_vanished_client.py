"""Clients whose host is gone without a word: what they had at the server is given back."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from server.config import GatewayConfig
from server.worker.worker import Worker
from tests.fakes.calls import stream, stubs_for, until
from tests.fakes.engines import FakeGenerator
from tests.fakes.gateways import running_cell

CONFIG = GatewayConfig(worker_wait=60, client_keepalive_timeout=0.5)
_CLIENT = """
import sys
from tokenweir import Client
for piece in Client(sys.argv[1], timeout=None).stream("dates", "HOLD"):
    pass
"""


class Wire:
    """A way to a port that can be cut, so that neither side hears of it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open = asyncio.Event()
        self._open.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        self._open.clear()

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._pumps.add(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await self._open.wait()
            sink.write(data)
            await sink.drain()

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def wire_to(
    engine: FakeGenerator, config: GatewayConfig = CONFIG
) -> AsyncIterator[tuple[Worker, Wire, str]]:
    """Serve behind a gateway; yield the worker, the wire, and the address of its near end."""
    async with running_cell(engine, config=config) as cell:
        wire = Wire(int(cell.stubs.address.rpartition(":")[2]))
        near_end = await asyncio.start_server(wire.join, "127.0.0.1", 0)
        try:
            yield cell.workers[0], wire, f"127.0.0.1:{near_end.sockets[0].getsockname()[1]}"
        finally:
            near_end.close()
            await wire.close()


async def test_a_client_that_has_vanished_frees_its_slot() -> None:
    engine = FakeGenerator()
    async with wire_to(engine) as (worker, wire, address), stubs_for(address) as stubs:
        call = stubs.generation.GenerateStream(stream("HOLD"))
        await call.initial_metadata()

        assert worker.load() == 1
        wire.cut()

        await until(lambda: worker.load() == 0)
        assert len(engine.aborted) == 1
        call.cancel()


async def test_a_client_that_only_waits_keeps_its_slot() -> None:
    engine, config = FakeGenerator(), replace(CONFIG, client_keepalive_timeout=1.0)
    async with wire_to(engine, config) as (_, _, address), stubs_for(address) as stubs:
        call = stubs.generation.GenerateStream(stream("HOLD"))
        await call.initial_metadata()

        await asyncio.sleep(
            2.5 * config.client_keepalive_timeout
        )  # a ping, and no answer would be the end
        engine.release.set()

        assert len([message async for message in call]) == 3


@pytest.mark.long
@pytest.mark.timeout(120)
async def test_a_client_that_is_frozen_frees_its_slot_within_a_minute() -> None:
    engine = FakeGenerator()
    async with wire_to(engine, GatewayConfig()) as (worker, _, address):
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", _CLIENT, address)
        try:
            await asyncio.wait_for(engine.seen.wait(), 60)
            assert worker.load() == 1

            client.send_signal(signal.SIGSTOP)
            frozen = time.monotonic()
            while worker.load() and time.monotonic() - frozen < 60:
                await asyncio.sleep(0.5)

            assert worker.load() == 0
            assert len(engine.aborted) == 1
        finally:
            client.kill()
            await client.wait()
