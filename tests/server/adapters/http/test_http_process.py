"""The HTTP server that `serve` runs beside its gateway."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenweir import AsyncClient, Unauthenticated

from engine.errors import ConfigError
from server.adapters.config import HttpConfig, http_config
from server.config import GatewayConfig
from server.gateway.admin.admin_port import admin_socket
from server.gateway.gateway import Gateway
from server.given_settings import GivenSettings
from server.ray.processes import http_process
from server.ray.processes.http_process import HttpProcess, http_beside
from server.ray.processes.run_directory import run_directory
from server.settings import Admin, Auth, Tls
from tests.fakes.calls import until
from tests.fakes.certificates import Authority
from tests.fakes.engines import OPTIONS, FakeGenerator, running_worker


@asynccontextmanager
async def gateway_at(
    path: Path, generator: FakeGenerator | None = None, **config: Any
) -> AsyncIterator[Gateway]:
    generator = generator or FakeGenerator()
    generator.capabilities += OPTIONS
    async with running_worker(generator) as (_, address):
        gateway = Gateway(GatewayConfig(local_socket=path, **config))
        await gateway.start()
        await gateway.pool.sync([address])
        await until(lambda: gateway.pool.num_serving == 1)
        try:
            yield gateway
        finally:
            await gateway.close()


async def test_the_local_socket_asks_for_tokens_but_for_no_certificate(tmp_path: Path):
    cert, key = Authority().certify().write(tmp_path)
    tokens = tmp_path / "tokens.toml"
    digest = hashlib.sha256(b"tw_a").hexdigest()
    tokens.write_text(f'[[token]]\nsha256 = "{digest}"\ntenant = "a"\n')
    operated = Admin(port=0, tokens=tokens)
    with run_directory() as directory:
        path = directory / "gateway"
        async with gateway_at(path, tls=Tls(cert, key), auth=Auth(tokens=tokens), admin=operated):
            assert path.parent.stat().st_mode & 0o077 == 0
            async with AsyncClient(f"unix:{path}", max_attempts=1) as client:
                with pytest.raises(Unauthenticated):
                    await client.models()
                known = client.calling_as("tw_a")
                assert (await known.generate("dates", "a b")).text == "a b "
            async with AsyncClient(f"unix:{admin_socket(path)}", token="tw_a") as admin:
                assert len((await admin.server_info()).replicas) == 1


async def test_who_calls_is_who_his_certificate_is_made_out_to_by_http_too(tmp_path: Path):
    authority, generator = Authority(), FakeGenerator()
    cert, key = authority.certify().write(tmp_path)
    (roots := tmp_path / "roots.pem").write_bytes(authority.pem)
    tls = Tls(cert, key, roots)
    asked = {"model": "dates", "prompt": "a b"}
    claims = {"tokenweir-certified-bin": base64.b64encode(b"victim").decode()}
    with run_directory() as directory:
        path = directory / "gateway"
        async with gateway_at(path, generator, tls=tls):
            config = HttpConfig(port=0, grace=1, tls=tls)
            async with http_beside(config, path) as url:
                for name in ("acme", "shöp"):
                    context = ssl.create_default_context(cadata=authority.pem.decode())
                    (tmp_path / name).mkdir()
                    context.load_cert_chain(*authority.certify(name).write(tmp_path / name))
                    async with aiohttp.ClientSession(headers=claims) as session:
                        for _ in range(2):  # on one connection
                            place = f"{url}/v1/completions"
                            async with session.post(place, json=asked, ssl=context) as found:
                                assert found.status == 200

    assert [request.tenant for request in generator.requests] == ["acme"] * 2 + ["shöp"] * 2


async def test_it_answers_with_the_gateways_certificate_and_lends_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("TOKENWEIR_TOKEN", "tw_a")
    authority = Authority()
    cert, key = authority.certify().write(tmp_path)
    tokens = tmp_path / "tokens.toml"
    digest = hashlib.sha256(b"tw_a").hexdigest()
    tokens.write_text(f'[[token]]\nsha256 = "{digest}"\ntenant = "a"\n')
    tls = Tls(cert, key)
    context = ssl.create_default_context(cadata=authority.pem.decode())
    asked = {"model": "dates", "prompt": "a b"}
    with run_directory() as directory:
        path = directory / "gateway"
        async with gateway_at(path, tls=tls, auth=Auth(tokens=tokens)) as gateway:
            config = HttpConfig(port=0, grace=1, tls=tls)
            async with http_beside(config, path) as url:
                async with aiohttp.ClientSession() as session:

                    async def status(token: str) -> int:
                        headers = {"Authorization": f"Bearer {token}"} if token else {}
                        async with session.post(
                            f"{url}/v1/completions", json=asked, headers=headers, ssl=context
                        ) as found:
                            return found.status

                    assert url.startswith("https://127.0.0.1:")
                    assert [await status(token) for token in ("", "tw_b", "tw_a")] == [
                        *(401, 401, 200)
                    ]
                    known = {"Authorization": "Bearer tw_a"}
                    async with session.get(f"{url}/page/load", headers=known, ssl=context) as found:
                        load = await found.json()  # without an admin port, too
                        assert (found.status, load["problem"]) == (200, "")
                        assert gateway.admin_port is None
    assert not [one.message for one in caplog.records if one.levelno >= logging.WARNING]


async def test_it_has_the_bounds_of_the_file_of_its_server(tmp_path: Path):
    (tmp_path / "serve.toml").write_text(
        "[listen]\ngrace = 1\n"
        "[http]\nport = 0\nmax_body_bytes = 60\nhead_seconds = 0.5\nmax_requests = 3\n"
    )
    given = GivenSettings()
    given.read(tmp_path / "serve.toml")
    with run_directory() as directory:
        path = directory / "gateway"
        async with gateway_at(path):
            config = http_config(given.served(), None)
            async with http_beside(config, path) as url:
                async with aiohttp.ClientSession() as session:
                    found = []
                    for prompt in ("a b", "a" * 60):
                        asked = {"model": "dates", "prompt": prompt}
                        async with session.post(f"{url}/v1/completions", json=asked) as answer:
                            found.append((answer.status, await answer.text()))
                port = int(url.rpartition(":")[2])
                silent, writer = await asyncio.open_connection("127.0.0.1", port)
                async with asyncio.timeout(8):  # it is 10 where nothing says otherwise
                    assert await silent.read() == b""
                writer.close()

    assert (config.port, config.grace, config.max_requests) == (0, 1.0, 3)
    assert [status for status, _ in found] == [200, 413]
    assert "the body has more than 60 bytes" in found[1][1]


async def test_it_is_started_again_on_its_port_when_it_dies(caplog: pytest.LogCaptureFixture):
    process = HttpProcess(HttpConfig(port=0, grace=1), "127.0.0.1:1")
    await process.start()
    url, first = process.url, process.pid
    keeping = asyncio.create_task(process.keep())
    try:
        os.kill(first, signal.SIGKILL)
        await until(lambda: process.pid != first and process.url == url)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/health") as found:
                assert found.status == 503
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        await process.stop()

    assert "has ended with -9, and is started again" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_it_ends_when_the_process_that_started_it_is_killed():
    starting = """
import asyncio, sys
from server.adapters.config import HttpConfig
from server.ray.processes.http_process import HttpProcess
async def main():
    process = HttpProcess(HttpConfig(port=0, grace=0), "127.0.0.1:1")
    await process.start()
    print(process.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", starting], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    descriptor = os.pidfd_open(int(parent.stdout.readline()))

    parent.kill()
    parent.communicate()
    ended, _, _ = select.select([descriptor], [], [], 30)

    os.close(descriptor)
    assert ended


async def test_what_is_said_before_it_listens_does_not_keep_it_from_starting(
    monkeypatch: pytest.MonkeyPatch,
):
    says = "import sys; sys.stderr.write('a warning at http://h:1/v1\\n'); sys.stderr.flush(); "
    command = f"{says} print('http://h:7', flush=True); import time; time.sleep(60)"
    monkeypatch.setattr(http_process, "_COMMAND", (sys.executable, "-c", command))
    process = HttpProcess(HttpConfig(port=0, grace=0), "127.0.0.1:1")

    async with asyncio.timeout(60):
        await process.start()
        await process.stop()

    assert process.url == "http://h:7"


_SAYS = """
import json, sys, time
print("http://h:7", flush=True)
print(json.dumps({"level": "info", "message": "cert.pem has changed"}), file=sys.stderr)
failed = {"level": "error", "message": "/v1 fails", "traceback": "Traceback\\nValueError: b"}
print(json.dumps(failed), file=sys.stderr)
print("Segmentation fault", file=sys.stderr)
print("[1]", file=sys.stderr, flush=True)
time.sleep(60)
"""


async def test_what_it_logs_has_the_same_level_and_its_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(http_process, "_COMMAND", (sys.executable, "-c", _SAYS))
    process = HttpProcess(HttpConfig(port=0, grace=0), "127.0.0.1:1")
    with caplog.at_level(logging.INFO, "server.ray"):
        await process.start()
        keeping = asyncio.create_task(process.keep())
        await until(lambda: len(caplog.records) == 4)
        keeping.cancel()
        await asyncio.wait([keeping])
        await process.stop()

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "http: cert.pem has changed"),
        ("ERROR", "http: /v1 fails"),
        ("ERROR", "http: Segmentation fault"),
        ("ERROR", "http: [1]"),
    ]
    assert caplog.records[1].exc_text == "Traceback\nValueError: b"


async def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = HttpConfig(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1.*--http-port"):
            HttpProcess(config, "127.0.0.1:1")


async def test_one_that_does_not_start_is_told_with_its_words(monkeypatch: pytest.MonkeyPatch):
    command = (sys.executable, "-c", "import sys; sys.exit('error: no room')")
    monkeypatch.setattr(http_process, "_COMMAND", command)
    process = HttpProcess(HttpConfig(port=0), "127.0.0.1:1")

    with pytest.raises(ConfigError, match="the HTTP server does not start: error: no room"):
        await process.start()
    await process.stop()
