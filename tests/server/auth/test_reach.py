"""Servers that strangers could reach, and which hosts those are."""

from __future__ import annotations

import re
import socket

import pytest

from server.cli.app import run
from server.hosts import addresses_of, family_of, is_loopback

TLS = "--tls-cert FILE --tls-key FILE"
OPERATED = "--admin-port 0 --admin-tokens FILE"


def served(options: str) -> int:
    """Say with what `serve` ends that would print its settings with these options."""
    words = [__file__ if word == "FILE" else word for word in options.split()]
    return run(["serve", "--print-config", *words])


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ("--host 0.0.0.0", ["--tls-cert", "--tokens or --tls-client-ca"]),
        (f"--host :: {TLS}", ["--tokens or --tls-client-ca"]),
        ("--host 10.0.0.7 --tokens FILE", ["--tls-cert"]),
        (f"--host server.example {TLS} --tokens FILE --admin-port 1", ["--admin-tokens"]),
        ("--metrics-port 9 --metrics-host 0.0.0.0", ["--tls-cert", "--admin-tokens"]),
        (f"--metrics-port 9 --metrics-host 0.0.0.0 {TLS}", ["--admin-tokens"]),
        (f"--metrics-port 9 --metrics-host 0.0.0.0 {OPERATED}", ["--tls-cert"]),
    ],
)
def test_a_server_that_strangers_could_reach_is_refused(
    options: str, missing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert served(options) == 3

    out, err = capsys.readouterr()
    assert not out
    host = re.findall(r"host (\S+)", options)[0]
    assert f"host ({host}) is reached from other machines" in err
    assert all(what in err for what in (*missing, "--insecure"))


@pytest.mark.parametrize(
    "options",
    [
        "--host ::1 --admin-port 0",
        "--host localhost",
        "--host unix:/run/socket",
        f"--host 0.0.0.0 {TLS} --tokens FILE",
        f"--host 0.0.0.0 {TLS} --tls-client-ca FILE",
        f"--host 0.0.0.0 {TLS} --tokens FILE {OPERATED}",
        "--host 0.0.0.0 --insecure --admin-port 0",
        "--metrics-host 0.0.0.0",  # there are none
        "--metrics-port 9",
        f"--metrics-port 9 --metrics-host 0.0.0.0 {TLS} {OPERATED}",
        "--metrics-port 9 --metrics-host 0.0.0.0 --insecure",
    ],
)
def test_others_are_not(options: str) -> None:
    assert served(options) == 0


@pytest.mark.parametrize(
    ("addresses", "is_local", "family"),
    [
        (["::1"], True, socket.AF_INET6),
        (["127.0.1.1"], True, socket.AF_INET),
        (["::1", "127.0.0.1"], True, socket.AF_INET),
        (["127.0.0.1", "10.0.0.7"], False, socket.AF_INET),
        (["::"], False, socket.AF_INET6),
        ([], False, socket.AF_INET),
    ],
)
def test_a_name_is_of_this_machine_alone_if_all_its_addresses_are(
    addresses: list[str],
    is_local: bool,
    family: socket.AddressFamily,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 1, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr("socket.getaddrinfo", found)

    assert (is_loopback("a-name"), family_of("a-name")) == (is_local, family)
    assert served("--host a-name") == (0 if is_local else 3)


def test_no_resolver_is_asked_for_a_socket_of_unix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("socket.getaddrinfo")

    assert addresses_of(f"unix:/tmp/{'long' * 20}") == []
