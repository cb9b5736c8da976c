"""Connections to the HTTP server that are slow, silent or endless."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn.protocols.http.auto
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.adapters.config import HttpConfig
from server.http_server import bounded
from server.settings import Http
from tests.fakes.http_calls import Caller, http_server

PARSERS = {H11Protocol, uvicorn.protocols.http.auto.AutoHTTPProtocol}  # httptools', if it is here
GET = b"GET / HTTP/1.1\r\nHost: a\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(params=sorted(PARSERS, key=str), ids=lambda parser: parser.__name__)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    def chosen(bounds: Http) -> type[asyncio.Protocol]:
        return bounded(bounds, request.param)

    monkeypatch.setattr("server.http_server.bounded", chosen)
    return request.param


@asynccontextmanager
async def http(**settings: Any) -> AsyncIterator[Caller]:
    async with http_server("127.0.0.1:1", HttpConfig(port=0, grace=0, **settings)) as caller:
        yield caller


@asynccontextmanager
async def connected(caller: Caller, data: bytes = b"") -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(caller.url.split(":")[-1]))
    writer.write(data)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize("head", [b"", GET + b"X: "])
async def test_a_head_that_does_not_come_is_not_waited_for(parser: Any, head: bytes):
    async with http(head_seconds=0.2) as caller, connected(caller, head) as (reader, _):
        assert await asyncio.wait_for(reader.read(), 60) == b""


async def test_a_connection_is_kept_as_long_as_is_said(parser: Any):
    request = GET + b"\r\n"
    async with (
        http(keep_alive_seconds=0.5) as caller,
        connected(caller, request) as (reader, writer),
    ):
        await reader.readuntil(b"</html>\n")
        await asyncio.sleep(0.2)
        writer.write(request)
        assert await reader.readuntil(b"</html>\n")
        assert await asyncio.wait_for(reader.read(), 60) == b""

    assert HttpConfig().keep_alive_seconds >= 75


async def test_the_next_head_of_a_connection_is_not_waited_for_either(parser: Any):
    async with http(head_seconds=0.5) as caller, connected(caller, GET + b"\r\n") as streams:
        reader, writer = streams
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"

        async def dripping() -> None:
            writer.write(GET)
            while True:
                writer.write(b"X: y\r\n")
                await asyncio.sleep(0.05)

        drip = asyncio.create_task(dripping())
        with contextlib.suppress(ConnectionError):  # it was closed before it had read all
            assert b"HTTP/1.1" not in await asyncio.wait_for(reader.read(), 60)
        drip.cancel()


async def test_a_head_without_an_end_is_cut_off(parser: Any):
    async with http(max_head_bytes=1000) as caller, connected(caller, GET + b"X: ") as streams:
        sending = asyncio.create_task(send_without_end(streams[1]))
        assert (await asyncio.wait_for(streams[0].readline(), 60)).startswith(b"HTTP/1.1 400")
        sending.cancel()


async def test_what_stands_behind_a_body_is_cut_off_too(parser: Any):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with http(max_head_bytes=1000, max_body_bytes=1000) as caller:
        async with connected(caller, head + b"1\r\na\r\n0\r\nX: ") as (reader, writer):
            sending = asyncio.create_task(send_without_end(writer))
            with contextlib.suppress(ConnectionError):
                answer = await asyncio.wait_for(reader.read(), 20)
                assert answer.startswith(b"HTTP/1.1 400") or not answer
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def send_without_end(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"y" * 1000)
        await writer.drain()
        await asyncio.sleep(0.001)


async def test_who_sends_whole_requests_is_answered_on_one_connection_for_longer(parser: Any):
    async with http(head_seconds=1.0, max_head_bytes=300) as caller:
        async with connected(caller) as (reader, writer):
            for _ in range(4):
                writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 100 + b"\r\n\r\n")
                while (await reader.readline()) != b"\r\n":
                    pass
                assert await reader.readexactly(24) == b'{"status":"NOT_SERVING"}'
                await asyncio.sleep(0.4)


async def test_what_a_body_has_is_not_counted_to_the_next_head(parser: Any):
    post = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n"
    async with http(max_head_bytes=1000) as caller, connected(caller, post) as streams:
        reader, writer = streams
        for _ in range(2):
            for _ in range(5):
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0.02)
            assert await reader.readline() == b"HTTP/1.1 400 Bad Request\r\n"
            length = 0
            while (line := await reader.readline()) != b"\r\n":
                if line.startswith(b"content-length:"):
                    length = int(line.split()[1])
            assert b"Invalid JSON" in await reader.readexactly(length)
            for part in (post[:20], post[20:]):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.05)


async def test_what_follows_a_refused_body_is_not_read_for_ever(parser: Any):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n"
    async with http(head_seconds=0.3, max_body_bytes=10) as caller:
        async with connected(caller, head + b"x" * 100) as (reader, writer):
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")

            async def sending() -> None:
                while True:
                    writer.write(b"x" * 1000)
                    await asyncio.sleep(0.01)

            send = asyncio.create_task(sending())
            with pytest.raises(ConnectionError):
                while await asyncio.wait_for(reader.read(1000), 60):
                    pass
                raise ConnectionResetError("it was closed")
            send.cancel()
