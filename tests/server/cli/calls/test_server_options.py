"""The commands call a server with certificates and a token, and keep both to themselves."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from tokenweir import AsyncClient, Client, PermissionDenied, Unauthenticated

from server.cli.app import cli, run
from server.config import GatewayConfig
from server.settings import Auth, Tls
from tests.fakes.certificates import Authority
from tests.fakes.engines import OPTIONS, FakeGenerator, FakePredictor
from tests.fakes.gateways import entry, running_cell, running_gateway

CALLERS = (
    *("generate", "score", "classify", "label", "embed", "models", "health"),
    *("loadtest", "http", "kserve", "load-model", "replay", "traffic", "unload-model"),
)


@dataclass
class Served:
    """A server by TLS that wants certificates of clients and tokens, and what opens it."""

    address: str
    files: list[str]  # options of the command line

    def arguments(self, *words: str) -> list[str]:
        return [*words, "--server", self.address, *self.files]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    authority = Authority()
    cert, key = authority.certify().write(tmp_path)
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.pem)
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(entry("tw_acme", tenant="acme", models=["dates"]))
    tls, auth = Tls(cert, key, ca), Auth(tokens=tokens)
    config = GatewayConfig(worker_wait=60, tls=tls, auth=auth)
    engine = FakeGenerator()
    engine.capabilities = ("generate", "stream", *OPTIONS)
    async with running_cell((engine, FakePredictor()), config=config) as cell:
        files = ["--tls-ca", str(ca), "--tls-cert", str(cert), "--tls-key", str(key)]
        yield Served(cell.stubs.address.replace("127.0.0.1", "localhost"), files)


@pytest.mark.parametrize("name", CALLERS)
def test_every_command_that_calls_a_server_takes_them(name: str) -> None:
    options = {option for p in cli.commands[name].params for option in p.opts}

    assert {"--server", "--token", "--tls-ca", "--tls-cert", "--tls-key"} <= options


def test_there_is_no_other_command_that_calls_a_server() -> None:
    names = {name for name, command in cli.commands.items() if _calls(command)}

    assert names == set(CALLERS)


def _calls(command: click.Command) -> bool:
    return any("--server" in parameter.opts for parameter in command.params)


async def test_a_command_shows_its_token_and_certificate(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = served.arguments("generate", "--model", "dates", "a b")

    assert await asyncio.to_thread(run, [*words, "--token", "tw_acme"]) == 0
    monkeypatch.setenv("TOKENWEIR_TOKEN", "tw_acme")
    assert await asyncio.to_thread(run, words) == 0

    assert capsys.readouterr().out == "a b \n" * 2


async def test_a_command_that_a_server_hangs_up_on_names_what_it_may_want(
    served: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "stranger").mkdir()  # the server reads its own files again
    cert, key = Authority("a stranger").certify().write(tmp_path / "stranger")
    shown = ["--tls-ca", served.files[1], "--tls-cert", str(cert), "--tls-key", str(key)]

    for given in (2, 6):
        words = ["models", "--server", served.address, *shown[:given]]
        assert await asyncio.to_thread(run, words) == 4
        assert "--tls-cert)" in capsys.readouterr().err


@pytest.mark.usefixtures("never_late")
@pytest.mark.parametrize("typed", ["{} {}", "{}={}"])
async def test_a_load_test_does_too_and_writes_no_token(
    typed: str, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "run.json", tmp_path / "run.html"
    secrets = typed.format("--token", "tw_acme"), typed.format("--admin-token", "tw_boss")
    words = served.arguments("loadtest", "--model", "dates", "--requests", "2")
    words += [*" ".join(secrets).split(), "--json", str(files[0]), "--html", str(files[1])]
    monkeypatch.setattr(sys, "argv", ["tokenweir", *words])

    assert await asyncio.to_thread(run, words) == 0

    assert not any(
        secret in file.read_text() for secret in ("tw_acme", "tw_boss") for file in files
    )
    hidden = typed.format("--token", "HIDDEN"), typed.format("--admin-token", "HIDDEN")
    assert " ".join(hidden) in json.loads(files[0].read_text())["command"]


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["models"], 1, "UNAUTHENTICATED: this server asks for a token"),
        (["models", "--token", "tw_wrong"], 1, "not known here"),
        (["models", "--token", "two words"], 2, "printable ASCII without spaces"),
        (["label", "--model", "tags", "a", "--token", "tw_acme"], 1, "not for model 'tags'"),
        (["health"], 0, ""),
    ],
)
async def test_a_refusal_says_why(
    words: list[str],
    code: int,
    problem: str,
    served: Served,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await asyncio.to_thread(run, served.arguments(*words)) == code

    assert problem in capsys.readouterr().err


async def test_models_are_those_that_the_token_may_use(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(run, served.arguments("models", "--token", "tw_acme")) == 0

    assert "dates" in (out := capsys.readouterr().out)
    assert "tags" not in out


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["--tls-cert", __file__], 2, "give --tls-cert and --tls-key"),
        (["--tls-cert", __file__, "--tls-key", __file__], 2, "give --tls-ca too"),
        (["--tls-ca", __file__], 3, "TLS cannot use"),
    ],
)
def test_certificates_that_cannot_be_used_are_named(
    words: list[str], code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", *words]) == code

    assert problem in capsys.readouterr().err


async def test_clients_raise_what_they_are_refused_with(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(entry("tw_acme", tenant="acme", models=["others"]))
    async with running_gateway(config=GatewayConfig(auth=Auth(tokens=tokens))) as (_, stubs):
        async with AsyncClient(stubs.address) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.generate("dates", "a")
        with Client(stubs.address, token="tw_acme") as known:
            with pytest.raises(PermissionDenied):
                await asyncio.to_thread(known.generate, "dates", "a")
