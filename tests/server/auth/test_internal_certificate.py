"""A gateway and its workers know each other where others could call them."""

from __future__ import annotations

import grpc
import pytest
from grpc import aio

from server.auth.internal_certificate import (
    CHANNEL_OPTIONS,
    InternalCertificate,
    internal_certificate,
)
from server.config import GatewayConfig, WorkerConfig
from server.gateway.gateway import Gateway
from server.worker.worker import Worker
from tests.fakes.calls import Stubs, generate, stream, stubs_for, until
from tests.fakes.engines import FakeGenerator


@pytest.fixture(scope="module")
def certificate() -> InternalCertificate:
    found = internal_certificate("10.0.0.7")
    assert found is not None
    return found


def test_on_one_machine_nothing_is_encrypted_between_them() -> None:
    assert internal_certificate("127.0.0.1") is None


def test_the_key_is_in_no_text(certificate: InternalCertificate) -> None:
    assert "PRIVATE" not in repr(certificate)


async def test_a_worker_takes_calls_of_its_gateway_only(certificate: InternalCertificate) -> None:
    worker = Worker({"dates": FakeGenerator()}, WorkerConfig(), certificate=certificate)
    address = await worker.start()
    gateway = Gateway(GatewayConfig(worker_wait=60), certificate=certificate)
    others = internal_certificate("10.0.0.7")
    assert others is not None
    try:
        port = await gateway.start()
        await gateway.pool.sync([address])
        await until(lambda: gateway.pool.num_serving == 1)
        async with stubs_for(f"127.0.0.1:{port}") as stubs:
            assert await stubs.still_serves()
            call = stubs.generation.GenerateStream(stream("a b"))
            assert len([message async for message in call]) == 4
        channels = [
            aio.insecure_channel(address),
            aio.secure_channel(
                address, grpc.ssl_channel_credentials(certificate.cert), options=CHANNEL_OPTIONS
            ),
            aio.secure_channel(address, others.channel_credentials(), options=CHANNEL_OPTIONS),
        ]
        for channel in channels:
            async with channel:
                with pytest.raises(aio.AioRpcError) as caught:
                    await Stubs(channel).generation.Generate(generate("a"), timeout=60)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await gateway.close()
        await worker.drain(0)
