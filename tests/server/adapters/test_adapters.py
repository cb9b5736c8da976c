"""Adapters of other protocols: their certificates, and the clients that they take."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import ssl
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from tokenweir import Unauthenticated
from tokenweir.open_inference import open_inference_pb2 as protocol

from engine.errors import ConfigError
from server.adapters.config import HttpConfig, KserveConfig
from server.adapters.reach import check_reach
from server.auth.tls import server_context
from server.cli.app import run
from server.cli.serving.adapters import serve_adapter
from server.settings import Settings, Tls
from tests.fakes.certificates import Authority
from tests.fakes.http_calls import Caller, http_server
from tests.fakes.kserve_calls import Stub, kserve_server


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls(authority: Authority, tmp_path: Path) -> Tls:
    cert, key = authority.certify().write(tmp_path)
    return Tls(cert, key)


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.pem.decode())


async def answers(caller: Caller, context: ssl.SSLContext) -> bool:
    """Say whether a new connection is answered that trusts what the context does."""
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(f"{caller.url}/health", ssl=context) as found:
                return found.status == 503  # nothing is behind
        except aiohttp.ClientError:
            return False


async def test_http_is_encrypted_by_a_certificate_that_may_be_renewed(
    tls: Tls, authority: Authority, tmp_path: Path
):
    renewed = Authority("renewed")
    async with http_server("127.0.0.1:1", HttpConfig(port=0, grace=1, tls=tls)) as caller:
        assert caller.url.startswith("https://")
        assert await answers(caller, trusting(authority))
        assert not await answers(caller, trusting(renewed))

        (tmp_path / "new").mkdir()
        for path in renewed.certify().write(tmp_path / "new"):
            os.replace(path, tmp_path / path.name)
        assert await answers(caller, trusting(renewed))
        assert not await answers(caller, trusting(authority))


async def test_a_half_renewed_certificate_is_logged_and_the_one_before_goes_on(
    tls: Tls,
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
):
    async with http_server("127.0.0.1:1", HttpConfig(port=0, grace=1, tls=tls)) as caller:
        assert tls.cert is not None
        with caplog.at_level(logging.ERROR, "server.auth"):
            tls.cert.write_bytes(authority.certify().cert)
            assert await answers(caller, trusting(authority))
        assert await answers(caller, trusting(authority))

    assert "what was read before goes on" in caplog.text


async def test_clients_of_http_show_a_certificate_where_one_is_asked_for(
    tls: Tls, authority: Authority, tmp_path: Path
):
    roots = tmp_path / "roots.pem"
    roots.write_bytes(authority.pem)
    shown = trusting(authority)
    (tmp_path / "client").mkdir()
    shown.load_cert_chain(*authority.certify("a client").write(tmp_path / "client"))
    asked = Tls(tls.cert, tls.key, roots)

    async with http_server("127.0.0.1:1", HttpConfig(port=0, grace=1, tls=asked)) as caller:
        assert await answers(caller, shown)
        assert not await answers(caller, trusting(authority))


async def test_a_client_that_says_nothing_does_not_keep_the_server_from_ending(
    tls: Tls, authority: Authority
):
    async with http_server("127.0.0.1:1", HttpConfig(port=0, grace=20, tls=tls)) as caller:
        place = "127.0.0.1", int(caller.url.rpartition(":")[2])

        def asked() -> ssl.SSLSocket:
            plain = socket.create_connection(place, timeout=60)
            connection = trusting(authority).wrap_socket(plain, server_hostname="localhost")
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            return connection

        connection = await asyncio.to_thread(asked)
        ending = time.monotonic()
    assert time.monotonic() - ending < 10
    connection.close()


async def test_a_client_gets_no_ticket_to_come_back_with(tls: Tls, authority: Authority):
    async with http_server("127.0.0.1:1", HttpConfig(port=0, grace=1, tls=tls)) as caller:
        place = "127.0.0.1", int(caller.url.rpartition(":")[2])

        def session() -> ssl.SSLSession | None:
            with (
                socket.create_connection(place, timeout=60) as plain,
                trusting(authority).wrap_socket(plain, server_hostname="localhost") as connection,
            ):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
                return connection.session

        found = await asyncio.to_thread(session)

    assert found is None or not found.has_ticket


async def test_a_client_whose_root_was_taken_away_is_let_in_no_more(
    tls: Tls, authority: Authority, tmp_path: Path
):
    before, after = Authority("before"), Authority("after")
    contexts = []
    for clients in (before, after):
        contexts.append(trusting(authority))
        (folder := tmp_path / str(len(contexts))).mkdir()
        contexts[-1].load_cert_chain(*clients.certify("a client").write(folder))
    old, new = contexts
    roots = tmp_path / "roots.pem"
    roots.write_bytes(before.pem)
    asked = Tls(tls.cert, tls.key, roots)

    async with http_server("127.0.0.1:1", HttpConfig(port=0, grace=1, tls=asked)) as caller:
        assert await answers(caller, old)
        roots.write_bytes(after.pem)
        assert await answers(caller, new)
        assert not await answers(caller, old)


def test_files_that_cannot_be_used_are_named(tls: Tls):
    assert tls.key is not None
    tls.key.write_bytes(Authority().certify().key)

    with pytest.raises(ConfigError, match="TLS cannot use .*cert.pem and .*key.pem"):
        server_context(tls)


async def test_kserve_is_encrypted(tls: Tls, authority: Authority):
    async with kserve_server("127.0.0.1:1", KserveConfig(port=0, grace=1, tls=tls)) as where:
        credentials = grpc.ssl_channel_credentials(authority.pem)
        async with grpc.aio.secure_channel(where, credentials) as channel:
            assert (await Stub(channel).ServerLive(protocol.ServerLiveRequest())).live
        async with grpc.aio.insecure_channel(where) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await Stub(channel).ServerLive(protocol.ServerLiveRequest(), timeout=60)


class FakeServer:
    """A server behind that asks for tokens, or does not."""

    def __init__(self, asks: bool) -> None:
        self._asks = asks

    async def models(self) -> tuple[()]:
        if self._asks:
            raise Unauthenticated("no token", code=grpc.StatusCode.UNAUTHENTICATED)
        return ()


_TLS = Tls(Path("c"), Path("k"))
_MUTUAL = Tls(Path("c"), Path("k"), Path("r"))


@pytest.mark.parametrize(
    ("host", "tls", "asks", "has_token", "problem"),
    [
        ("127.0.0.1", Tls(), False, True, ""),
        ("::1", Tls(), False, True, ""),
        ("0.0.0.0", Tls(), True, False, "calls need to be encrypted"),
        ("0.0.0.0", _TLS, False, False, "has no authentication"),
        ("0.0.0.0", _TLS, True, True, "would go on with --token"),
        ("0.0.0.0", _TLS, True, False, ""),
        ("0.0.0.0", _MUTUAL, False, True, ""),
    ],
)
async def test_strangers_are_let_in_only_by_tls_and_if_somebody_asks_who_they_are(
    host: str, tls: Tls, asks: bool, has_token: bool, problem: str
):
    server: Any = FakeServer(asks)
    checked = check_reach(HttpConfig(host=host, tls=tls), server, has_token=has_token)
    if problem:
        with pytest.raises(ConfigError, match=problem):
            await checked
    else:
        await checked


@pytest.mark.parametrize("command", ["http", "kserve"])
def test_other_machines_are_let_in_only_when_told_so(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run([command, "--host", "0.0.0.0"]) == 3
    assert "host (0.0.0.0) is reached from other machines" in capsys.readouterr().err

    cert, _ = Authority().certify().write(tmp_path)
    assert run([command, "--listen-tls-cert", str(cert)]) == 3
    assert "error: --listen-tls-cert: tls.cert (" in (err := capsys.readouterr().err)
    assert "belong together; give both, or none" in err
    assert run([command, "--listen-tls-client-ca", str(cert)]) == 3
    assert "needs a certificate of the server too" in capsys.readouterr().err


_FILE = """
[packages]
models = { dates = "nowhere" }
[listen]
host = "::1"
grace = 4.0
[engine]
max_queue_size = 5
[tls]
cert = "c"
key = "k"
client_ca = "r"
[auth]
tokens = "t"
[http]
port = 7
max_requests = 5
timeout = 6.0
max_body_bytes = 7
body_seconds = 8.0
head_seconds = 9.0
max_head_bytes = 10
[kserve]
port = 11
max_requests = 12
timeout = 13.0
max_request_bytes = 14
max_open_bytes = 15
[log]
format = "json"
"""


@pytest.mark.parametrize(("is_there", "loop"), [(True, "uvloop"), (False, "asyncio")])
def test_they_run_by_uvloop_where_it_is_installed(
    is_there: bool, loop: str, monkeypatch: pytest.MonkeyPatch
):
    found = []
    serve = serve_adapter

    async def note(client: object, config: object, announce: object) -> None:
        found.append(type(asyncio.get_running_loop()).__module__.partition(".")[0])

    monkeypatch.setattr(
        "server.cli.serving.adapters.serve_adapter",
        lambda server, settings, config, _, said: serve(server, settings, config, note, said),
    )
    monkeypatch.setattr("server.telemetry.logs.log_to_stderr", lambda config: None)
    if not is_there:
        monkeypatch.setattr("server.cli.serving.adapters.find_spec", lambda name: None)

    assert (run(["http"]), run(["kserve"])) == (0, 0)

    assert found == [loop, loop]


@dataclass
class Given:
    """The settings of an adapter that was to be served, and what it is made with."""

    settings: Settings
    config: HttpConfig | KserveConfig


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> list[Given]:
    found: list[Given] = []
    monkeypatch.setattr(
        "server.cli.serving.adapters.serve_adapter",
        lambda server, settings, config, serve, said: found.append(Given(settings, config)),
    )
    return found


def test_the_commands_take_the_file_of_the_service_and_options_win_over_it(
    adapters: list[Given], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOKENWEIR_ADMIN_TOKEN", "a")
    (tmp_path / "serve.toml").write_text(_FILE)
    file = ["--config", str(tmp_path / "serve.toml")]
    tls = Tls(tmp_path / "c", tmp_path / "k", tmp_path / "r")
    bounds = {"max_body_bytes": 7, "body_seconds": 8, "head_seconds": 9, "max_head_bytes": 10}
    http = HttpConfig(
        host="::1", port=7, max_requests=5, timeout=6, grace=4, tls=tls, admin_token="a", **bounds
    )
    kserve = KserveConfig(
        **{"host": "::1", "port": 11, "max_requests": 12, "timeout": 13, "grace": 4, "tls": tls},
        **{"max_request_bytes": 14, "max_open_bytes": 15},
    )

    assert run(["http", *file]) == 0
    assert run(["http", *file, "--admin-token", "b", "--port", "0", "--max-body-bytes", "3"]) == 0
    assert run(["kserve", *file]) == 0
    assert run(["kserve", *file, "--timeout", "3", "--log-format", "text", "--insecure"]) == 0

    assert [adapter.config for adapter in adapters] == [
        http,
        replace(http, port=0, max_body_bytes=3, admin_token="b"),
        kserve,
        replace(kserve, timeout=3),
    ]
    assert [adapter.settings.log.format for adapter in adapters] == ["json", "json", "json", "text"]
    told = [adapter.settings.auth.insecure for adapter in adapters]
    assert told == [False, False, False, True]


def test_a_file_whose_service_has_no_gateway_is_theirs_too(
    adapters: list[Given], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "serve.toml"
    file.write_text("[listen]\ngateway = false\nport = 8000\n")

    for more in ([], ["--print-config"]):
        assert run(["http", "--config", str(file), *more]) == 0

    assert "\nport = 8000  # default" in capsys.readouterr().out
    assert [adapter.config.port for adapter in adapters] == [8000]


@pytest.mark.parametrize(
    ("command", "config"), [("http", HttpConfig()), ("kserve", KserveConfig())]
)
def test_without_a_file_they_have_their_own_settings(
    command: str, config: HttpConfig | KserveConfig, adapters: list[Given]
):
    assert run([command]) == 0

    assert [adapter.config for adapter in adapters] == [config]


@pytest.mark.parametrize("command", ["http", "kserve"])
def test_what_is_printed_is_a_file_with_the_same_settings(
    command: str, adapters: list[Given], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "serve.toml").write_text(_FILE)
    typed = [command, "--config", str(tmp_path / "serve.toml"), "--port", "0"]

    assert run([*typed, "--print-config"]) == 0
    (tmp_path / "again.toml").write_text(printed := capsys.readouterr().out)
    assert run(typed) == run([command, "--config", str(tmp_path / "again.toml")]) == 0

    first, again = adapters
    assert first.config == again.config
    assert "port = 0  # --port\n" in printed
    assert f"timeout = {first.config.timeout}  # {tmp_path / 'serve.toml'}\n" in printed
    assert not re.search(r"packages|max_queue_size|tokens", printed), "it has none of them"


@pytest.mark.parametrize("command", ["http", "kserve"])
async def test_the_log_of_one_is_json_where_that_is_wanted(command: str):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from server.cli import main; main()", command),
        *("--server", "127.0.0.1:1", "--port", "0", "--log-format", "json"),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    line = json.loads(await asyncio.wait_for(process.stderr.readline(), 240))
    process.terminate()
    _, rest = await asyncio.wait_for(process.communicate(), 240)

    assert line["message"].startswith("serving ")
    assert line["message"].endswith(", for 127.0.0.1:1; Ctrl-C stops")
    assert (process.returncode, rest) == (0, b"")
