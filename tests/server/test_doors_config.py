"""Settings of the doors: what does not fit together, and what strangers could reach."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from server.config import GatewayConfig, GatewayRoleConfig, MetricsConfig, ServeConfig
from server.hosts import addresses_of, family_of, is_loopback
from server.identity.config import DoorsConfig

A = Path("a")
TLS: dict[str, Any] = {"tls_cert": A, "tls_key": A}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tls_cert": A}, "belong together"),
        ({"tls_client_ca": A}, "give tls_cert and tls_key"),
        ({"admin_tokens": A}, "give admin_port"),
        ({"admin_port": 70_000}, r"admin_port \(70000\) must be"),
    ],
)
def test_what_does_not_fit_together_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        DoorsConfig(**settings)


@pytest.mark.parametrize(
    ("host", "settings", "missing"),
    [
        ("0.0.0.0", {}, ["--tls-cert", "--tokens or --tls-client-ca"]),
        ("::", TLS, ["--tokens or --tls-client-ca"]),
        ("10.0.0.7", {"tokens": A}, ["--tls-cert"]),
        ("server.example", {**TLS, "tokens": A, "admin_port": 1}, ["--admin-tokens"]),
    ],
)
def test_a_server_that_strangers_could_call_is_refused(
    host: str, settings: dict[str, Any], missing: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        DoorsConfig(**settings).check_reach(host)

    assert host in str(caught.value)
    assert all(what in str(caught.value) for what in (*missing, "127.0.0.1", "--insecure"))


@pytest.mark.parametrize(
    ("host", "settings"),
    [
        ("127.0.0.1", {}),
        ("::1", {"admin_port": 0}),
        ("localhost", {}),
        ("unix:/run/socket", {}),
        ("0.0.0.0", {**TLS, "tokens": A}),
        ("0.0.0.0", {**TLS, "tls_client_ca": A}),
        ("0.0.0.0", {**TLS, "tokens": A, "admin_port": 0, "admin_tokens": A}),
        ("0.0.0.0", {"insecure": True, "admin_port": 0}),
    ],
)
def test_others_are_not(host: str, settings: dict[str, Any]) -> None:
    DoorsConfig(**settings).check_reach(host)


def test_what_is_served_is_looked_at_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        ServeConfig(packages={"dates": A}, host="0.0.0.0")


OPERATED: dict[str, Any] = {"admin_port": 0, "admin_tokens": A}


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({}, ["--tls-cert", "--admin-tokens"]),
        (TLS, ["--admin-tokens"]),
        (OPERATED, ["--tls-cert"]),
    ],
)
def test_metrics_that_strangers_could_read_are_refused(
    settings: dict[str, Any], missing: list[str]
) -> None:
    metrics = MetricsConfig(port=9100, host="0.0.0.0")
    gateway = GatewayConfig(doors=DoorsConfig(**settings))
    with pytest.raises(ConfigError, match=r"metrics.host \(0.0.0.0\)") as served:
        ServeConfig(packages={"dates": A}, metrics=metrics, gateway=gateway)
    with pytest.raises(ConfigError, match=r"metrics.host \(0.0.0.0\)"):
        GatewayRoleConfig("10.0.0.1:6379", metrics=metrics, gateway=gateway)

    assert all(what in str(served.value) for what in (*missing, "--insecure"))


@pytest.mark.parametrize(
    ("metrics", "settings"),
    [
        (MetricsConfig(host="0.0.0.0"), {}),  # there are none
        (MetricsConfig(port=9100), {}),
        (MetricsConfig(port=9100, host="0.0.0.0"), {**TLS, **OPERATED}),
        (MetricsConfig(port=9100, host="0.0.0.0"), {"insecure": True}),
    ],
)
def test_other_metrics_are_not(metrics: MetricsConfig, settings: dict[str, Any]) -> None:
    metrics.check_reach(DoorsConfig(**settings))


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
    def found(host: str, *_: object, **__: object) -> list[Any]:
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 1, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr("socket.getaddrinfo", found)

    assert (is_loopback("a-name"), family_of("a-name")) == (is_local, family)
    if not is_local:
        with pytest.raises(ConfigError, match="a-name.* is reached from other machines"):
            DoorsConfig().check_reach("a-name")


def test_no_resolver_is_asked_for_a_socket_of_unix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("socket.getaddrinfo")

    assert addresses_of(f"unix:/tmp/{'long' * 20}") == []
