"""A gateway and its workers know each other where others could call them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import tempfile

import grpc
import pytest
from grpc import aio

from server.auth.peers import CHANNEL_OPTIONS, NAME, Peers, peers_of
from server.config import GatewayConfig, WorkerConfig
from server.gateway.gateway import Gateway
from server.ray.registry import Registry, WorkerInfo
from server.ray.roster import Roster
from server.ray.roster_link import RosterLink
from server.worker.worker import Worker
from tests.fakes.calls import Stubs, generate, stream, stubs_for, until
from tests.fakes.engines import FakeGenerator


@pytest.fixture(scope="module")
def peers() -> Peers:
    found = peers_of("10.0.0.7")
    assert found is not None
    return found


def test_on_one_machine_nothing_is_encrypted_between_them() -> None:
    assert peers_of("127.0.0.1") is None


def test_the_key_is_in_no_text(peers: Peers) -> None:
    assert "PRIVATE" not in repr(peers)


def test_the_key_is_on_no_disk(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")  # as where the root is read-only

    for purpose in ssl.Purpose.SERVER_AUTH, ssl.Purpose.CLIENT_AUTH:
        assert peers.context(purpose).cert_store_stats()["x509"] == 1


async def test_a_worker_takes_calls_of_its_gateway_only(peers: Peers) -> None:
    worker = Worker({"dates": FakeGenerator()}, WorkerConfig(), peers=peers)
    address = await worker.start()
    gateway = Gateway(GatewayConfig(worker_wait=60), peers=peers)
    others = peers_of("10.0.0.7")
    assert others is not None
    try:
        port = await gateway.start()
        await gateway.sync([address])
        await until(lambda: gateway.num_serving == 1)
        async with stubs_for(f"127.0.0.1:{port}") as stubs:
            assert await stubs.still_serves()
            call = stubs.generation.GenerateStream(stream("a b"))
            assert len([message async for message in call]) == 4
        channels = [
            aio.insecure_channel(address),
            aio.secure_channel(
                address, grpc.ssl_channel_credentials(peers.cert), options=CHANNEL_OPTIONS
            ),
            aio.secure_channel(address, others.of_channel(), options=CHANNEL_OPTIONS),
        ]
        for channel in channels:
            async with channel:
                with pytest.raises(aio.AioRpcError) as caught:
                    await Stubs(channel).generation.Generate(generate("a"), timeout=60)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await gateway.close()
        await worker.drain(0)


async def test_a_roster_hears_its_workers_only(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()
    roster = Roster(registry)
    address = await roster.start("127.0.0.1", peers)
    worker = WorkerInfo("10.0.0.8:1", 1, "r")
    link = RosterLink(address)
    try:
        link.alive(worker)
        async with asyncio.timeout(60):
            assert await registry.changed(()) == (worker,)
        with caplog.at_level(logging.INFO, "server.ray"):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(f'{{"token": "{address.token}", "pid": 2}}\n'.encode())
            writer.write(b'{"level": 40, "text": "forged"}\n')
            assert await reader.read() == b""  # it has hung up
            writer.close()
            nameless = ssl.create_default_context(cadata=peers.cert.decode())
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=nameless, server_hostname=NAME
            )
            with contextlib.suppress(OSError):  # clients without a certificate are sent away
                writer.write(f'{{"token": "{address.token}", "pid": 2}}\n'.encode())
                writer.write(b'{"level": 40, "text": "forged"}\n{"leaving": true}\n')
                assert await reader.read(1) == b""
            writer.close()
    finally:
        await link.close()
        await roster.close()

    assert "forged" not in caplog.text
