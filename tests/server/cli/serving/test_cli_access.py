"""Tokens are made; serve takes them, certificates and --insecure."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.auth.tokens import Identity, TokenFile
from server.cli.app import run
from server.config import gateway_config
from server.gateway.authenticator import check_access
from server.given_settings import GivenSettings
from server.settings import Admin, Settings, Tls
from tests.fakes.certificates import Authority


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Settings]:
    """Run commands beside a package; what would be served is put down here."""
    (package := tmp_path / "packages/dates").mkdir(parents=True)
    (package / "manifest.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    found: list[Settings] = []
    monkeypatch.setattr("server.cli.serving.service.serve_until_ended", found.append)
    return found


SERVE = ["serve", "--model", "dates=s3://models/dates"]


def test_a_token_that_was_made_is_known_by_the_entry_that_was_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-priority", "-2", "--max-requests", "8", "--tokens-per-minute", "600"]
    tenant = 'Größe "1" \\ 2'

    assert run(["token", "--tenant", tenant, *options, "--model", "a", "--model", "b"]) == 0
    assert run(["token", "--tenant", "other"]) == 0

    out, err = capsys.readouterr()
    file = tmp_path / "tokens.toml"
    file.write_text(out)
    tokens = TokenFile(file)
    made = re.findall(r"shown this once: (tw_[\w-]{43})$", err, re.M)
    found = [tokens.identity([("authorization", f"Bearer {one}")]) for one in made]
    assert found == [Identity(tenant, -2, 8, 600, frozenset("ab")), Identity("other")]
    assert not any(one in out for one in made)


def test_a_tenant_that_cannot_be_printed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["token", "--tenant", "a\nb"]) == 2
    assert run(["token", "--tenant", "a", "--model", ""]) == 2, "serve would refuse the entry"
    assert run(["token", "--tenant", "a", "--model", "m" * 65]) == 2

    errors = capsys.readouterr().err
    assert errors.count("a name of 1 to 64 characters that can be printed") == 3, errors


def test_serve_takes_certificates_tokens_and_ports(served: list[Settings], tmp_path: Path) -> None:
    names = ("tls-cert", "tls-key", "tls-client-ca", "tokens", "admin-tokens")
    files = {name: tmp_path / name for name in names}
    for path in files.values():
        path.touch()
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]

    assert run([*SERVE, *options, "--admin-port", "0", "--reflection", "--host", "0.0.0.0"]) == 0

    (config,) = served
    gateway = gateway_config(config)
    assert gateway.tls == Tls(files["tls-cert"], files["tls-key"], files["tls-client-ca"])
    assert gateway.auth.tokens == files["tokens"]
    assert gateway.admin == Admin(0, files["admin-tokens"])
    assert gateway.reflection


def test_serve_lets_other_machines_in_only_if_it_is_told_to(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SERVE, "--host", "0.0.0.0"]) == 3
    assert "type --insecure to take calls from everywhere" in capsys.readouterr().err
    assert not served

    assert run([*SERVE, "--host", "0.0.0.0", "--insecure"]) == 0
    assert len(served) == 1


@pytest.mark.parametrize(
    ("section", "texts", "problem"),
    [
        ("auth", {"tokens": "[[token]]\n"}, "tokens: token 1, line 1: sha256 is missing"),
        ("admin", {"tokens": "x"}, "tokens is .* TOML: "),
        ("tls", {"cert": "", "key": ""}, "TLS cannot use .*cert and "),
    ],
)
def test_certificates_and_tokens_are_looked_at_before_anything_is_started(
    section: str, texts: dict[str, str], problem: str, tmp_path: Path
) -> None:
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    document = {"listen": {"port": 0}, "admin": {"port": 0}}
    document.setdefault(section, {}).update({name: name for name in texts})
    given = GivenSettings()
    given.take(document, "a file", tmp_path)

    with pytest.raises(ConfigError, match=problem):
        check_access(given.settings())


def test_a_failed_handshake_is_one_line_and_nothing_of_grpcs_own(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(Authority().pem)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        place = f"127.0.0.1:{server.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", "from server.cli import main; main()", "health"]
            + ["--server", place, "--tls-ca", str(tmp_path / "ca.pem")],
            capture_output=True,
            text=True,
        )
        server.shutdown(socket.SHUT_RDWR)

    assert done.returncode == 4
    assert done.stderr.startswith("error: UNAVAILABLE/HANDSHAKE_FAILED: the TLS handshake failed: ")
    assert len(done.stderr.splitlines()) == 1
