"""The public port with certificates: encrypted, of known clients, renewed while streams go on."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from tokenweir import AsyncClient, Unavailable
from tokenweir.v1 import generation_service_pb2 as pb

from engine.errors import ConfigError
from server.auth.certified import CERTIFIED_KEY, certified_name
from server.config import GatewayConfig
from server.gateway.gateway import Gateway
from server.settings import Tls
from tests.fakes import engines as fakes
from tests.fakes.calls import Stubs, generate, stream
from tests.fakes.certificates import Authority
from tests.fakes.engines import FakeGenerator
from tests.fakes.gateways import running_cell

OPTIONS = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))


@asynccontextmanager
async def served(tls: Tls, engine: FakeGenerator | None = None) -> AsyncIterator[str]:
    """Serve an engine with this certificate; yield the address."""
    config = GatewayConfig(worker_wait=60, tls=tls)
    async with running_cell(engine or FakeGenerator(), config=config) as cell:
        yield cell.stubs.address


@asynccontextmanager
async def stubs_with(address: str, credentials: grpc.ChannelCredentials) -> AsyncIterator[Stubs]:
    async with aio.secure_channel(address, credentials, options=OPTIONS) as channel:
        yield Stubs(channel)


async def refusal(call: Any) -> grpc.StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code()


def trusting(authority: Authority) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(authority.pem)


def fair() -> FakeGenerator:
    """Return an engine that knows tenants, as all real ones do."""
    engine = FakeGenerator()
    engine.capabilities = ("generate", "stream", *fakes.OPTIONS)
    return engine


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls(authority: Authority, tmp_path: Path) -> Tls:
    cert, key = authority.certify().write(tmp_path)
    return Tls(cert, key)


async def test_calls_are_encrypted_and_others_are_not_taken(tls: Tls, authority: Authority) -> None:
    async with served(tls) as address:
        async with stubs_with(address, trusting(authority)) as stubs:
            assert await stubs.still_serves()
        async with stubs_with(address, trusting(Authority("another"))) as stubs:
            stranger = await refusal(stubs.generation.Generate(generate("a"), timeout=60))
        async with aio.insecure_channel(address, options=OPTIONS) as channel:
            plain = await refusal(Stubs(channel).generation.Generate(generate("a"), timeout=60))

    assert stranger is plain is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("host", "trusted", "asks", "problem"),
    [
        ("127.0.0.1", "another", False, "the TLS handshake failed: .* not trusted here; give"),
        ("127.0.0.2", "a test", False, "the TLS handshake failed: .* has other names; call"),
        ("127.0.0.1", "", False, "the server hangs up, as one does that takes calls by TLS alone"),
        ("127.0.0.1", "a test", True, "the server hangs up, as one does that .* \\(--tls-cert\\)"),
    ],
)
async def test_a_handshake_that_fails_is_what_the_client_says_first(
    host: str,
    trusted: str,
    asks: bool,
    problem: str,
    tls: Tls,
    authority: Authority,
    tmp_path: Path,
) -> None:
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    tls = replace(tls, client_ca=tmp_path / "ca.pem" if asks else None)
    authorities = {"a test": authority, "another": Authority("another")}
    credentials = trusting(authorities[trusted]) if trusted else None
    gateway = Gateway(GatewayConfig(host=host, tls=tls))
    address = f"{host}:{await gateway.start()}"

    try:
        async with AsyncClient(address, credentials=credentials, max_attempts=1) as client:
            with pytest.raises(Unavailable, match=f"^UNAVAILABLE/HANDSHAKE_FAILED: {problem}"):
                await client.models()
    finally:
        await gateway.close()


async def test_a_certificate_that_has_expired_is_told(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.certify(days=-1).write(tmp_path)
    gateway = Gateway(GatewayConfig(tls=Tls(cert, key)))
    address = f"127.0.0.1:{await gateway.start()}"

    try:
        async with AsyncClient(address, credentials=trusting(authority), max_attempts=1) as client:
            with pytest.raises(Unavailable, match="certificate has expired, or is not valid yet"):
                await client.models()
    finally:
        await gateway.close()


async def test_a_server_of_http_is_told_by_a_client_of_grpc() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with AsyncClient(f"127.0.0.1:{port}", max_attempts=1) as client:
            with pytest.raises(Unavailable, match="the server speaks HTTP, not gRPC; give"):
                await client.models()


async def test_a_client_shows_a_certificate_where_one_is_asked_for(
    tls: Tls, authority: Authority, tmp_path: Path
) -> None:
    clients = Authority("those who may call")
    (tmp_path / "clients.pem").write_bytes(clients.pem)
    tls = replace(tls, client_ca=tmp_path / "clients.pem")
    known = clients.certify("client").of_client(authority)
    unknown = Authority("others").certify("client").of_client(authority)

    async with served(tls, fair()) as address:
        async with stubs_with(address, known) as stubs:
            assert await stubs.still_serves()
        for credentials in (unknown, trusting(authority)):
            async with stubs_with(address, credentials) as stubs:
                code = await refusal(stubs.generation.Generate(generate("a"), timeout=60))
                assert code is grpc.StatusCode.UNAVAILABLE
        (tmp_path / "clients.pem").write_bytes(Authority("others by now").pem)
        async with stubs_with(address, known) as stubs:
            code = await refusal(stubs.generation.Generate(generate("a"), timeout=60))
            assert code is grpc.StatusCode.UNAVAILABLE


async def test_where_certificates_say_who_calls_the_message_does_not(
    tls: Tls, authority: Authority, tmp_path: Path
) -> None:
    clients = Authority("those who may call")
    (tmp_path / "clients.pem").write_bytes(clients.pem)
    tls = replace(tls, client_ca=tmp_path / "clients.pem")
    engine = fair()

    async with served(tls, engine) as address:
        for name in ("acme", "shop"):
            known = clients.certify(name).of_client(authority)
            async with stubs_with(address, known) as stubs:
                for priority in (-100, 7):
                    said = pb.Scheduling(tenant="victim", priority=priority)
                    request = generate("a", scheduling=said)
                    claim = ((CERTIFIED_KEY, b"victim"),)  # servers on this machine may tell it
                    await stubs.generation.Generate(request, metadata=claim)

    found = [(request.tenant, request.priority) for request in engine.requests]
    assert found == [("acme", 0), ("acme", 7), ("shop", 0), ("shop", 7)]


@pytest.mark.parametrize(
    ("certificate", "name"),
    [
        ({"subject": ((("countryName", "DE"),), (("commonName", "acme"),))}, "acme"),
        ({"subject": (), "subjectAltName": (("DNS", "shop"), ("DNS", "b"))}, "shop"),
        ({"subject": ((("commonName", "acme"),),), "subjectAltName": (("DNS", "b"),)}, "acme"),
        ({"subject": ((("countryName", "DE"),),)}, ""),
    ],
)
def test_a_certificate_is_made_out_to_its_common_name_or_else_its_first_other(
    certificate: dict[str, Any], name: str
) -> None:
    assert certified_name(certificate) == name


async def test_a_renewed_certificate_meets_new_connections_and_streams_go_on(
    tls: Tls, authority: Authority, tmp_path: Path
) -> None:
    engine, renewed = FakeGenerator(), Authority("renewed")
    async with served(tls, engine) as address, stubs_with(address, trusting(authority)) as old:
        call = old.generation.GenerateStream(stream("a HOLD b"))
        await engine.seen.wait()
        _write_renewed(renewed, tmp_path)

        async with stubs_with(address, trusting(renewed)) as new:
            assert await new.still_serves()
        engine.release.set()
        messages = [message async for message in call]
        assert await old.still_serves()  # by the connection that it has

    assert "".join(message.delta.text for message in messages) == "a HOLD b "


async def test_a_half_renewed_certificate_is_logged_and_the_one_before_goes_on(
    tls: Tls, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = Authority("renewed")
    new = renewed.certify()
    assert tls.cert is not None
    async with served(tls) as address:
        with caplog.at_level(logging.INFO, "server.auth"):
            tls.cert.write_bytes(new.cert)  # its key is not there yet
            async with stubs_with(address, trusting(authority)) as stubs:
                assert await stubs.still_serves()
            (tmp_path / "key.pem").write_bytes(new.key)
            async with stubs_with(address, trusting(renewed)) as stubs:
                assert await stubs.still_serves()

    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "cert.pem and " in errors[0] and "read before goes on" in errors[0]


@pytest.mark.parametrize("wrong", ["missing", "no PEM", "another key", "a password"])
async def test_files_that_cannot_be_used_are_named_at_the_start(
    wrong: str, tls: Tls, tmp_path: Path
) -> None:
    key = tmp_path / "key.pem"
    match wrong:
        case "missing":
            key.unlink()
        case "no PEM":
            key.write_bytes(b"\x30\x82")
        case "another key":
            key.write_bytes(Authority().certify().key)
        case "a password":
            key.write_bytes(Authority().certify().with_password(b"secret"))

    with pytest.raises(ConfigError, match="TLS cannot use .*cert.pem and .*key.pem"):
        await asyncio.wait_for(Gateway(GatewayConfig(tls=tls)).start(), 60)


def _write_renewed(authority: Authority, folder: Path) -> None:
    """Renew a certificate as tools do that write to another name first."""
    staging = folder / "staging"
    staging.mkdir()
    for path in authority.certify().write(staging):
        os.replace(path, folder / path.name)
