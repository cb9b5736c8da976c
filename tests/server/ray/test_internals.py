"""Private names of Ray: which Ray has them, and what is said of one that has not."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from engine.errors import ConfigError
from server.ray import internals

pytestmark = pytest.mark.filterwarnings("ignore")  # importing Ray Serve warns


def test_private_names_were_looked_at_in_the_ray_that_is_installed() -> None:
    import ray

    assert ray.__version__.startswith(f"{internals.VERSION}."), (
        f"server/ray/internals.py is written for Ray {internals.VERSION}, and this is "
        f"{ray.__version__}: see whether each name there still does what is said of it"
    )


@pytest.mark.parametrize(
    ("missing", "use"),
    [
        ("_private.node.Node.start_api_server", internals.run_ray_command),
        ("serve._private.replica.add_port_to_grpc_server", internals.ServePort),
        ("_raylet.GcsClient", lambda: internals.Table("127.0.0.1:1", "").get("")),
    ],
)
def test_a_ray_without_a_name_is_refused_with_its_version(
    missing: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.scripts.scripts  # noqa: F401  # before it is looked for without gRPC

    monkeypatch.setitem(sys.modules, "grpc", sys.modules["grpc"])  # as it was, behind the test
    monkeypatch.delattr(f"ray.{missing}")

    message = rf"Ray \d+\.\d+.*{missing.rpartition('.')[2]}.*install a version that the extra"
    with pytest.raises(ConfigError, match=message):
        use()


def test_rays_own_command_starts_neither_a_dashboard_nor_a_server_of_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private import utils
    from ray._private.node import Node

    found: list[object] = []
    monkeypatch.setitem(sys.modules, "grpc", sys.modules["grpc"])
    monkeypatch.setattr(Node, "start_api_server", Node.start_api_server)
    monkeypatch.setattr(
        "ray.scripts.scripts.main",
        lambda: found.extend(
            [
                Node.start_api_server(object(), include_dashboard=True, raise_on_failure=True),
                utils.get_ray_client_dependency_error(),
            ]
        ),
    )

    internals.run_ray_command()

    assert found[0] is None
    assert isinstance(found[1], ImportError)


@pytest.mark.parametrize("calls", [True, False])
def test_a_replica_starts_only_where_rays_own_port_is_bound_to_its_node(
    calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.serve._private import replica

    bound: list[str] = []
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setattr(
        replica, "add_port_to_grpc_server", lambda server, address: bound.append(address) or 5
    )
    port = internals.ServePort()
    if calls:
        assert replica.add_port_to_grpc_server(None, "[::]:0") == 5
        port.check()
    else:
        with pytest.raises(ConfigError, match=r"Ray .* own port is not bound to 10\.0\.0\.7 alone"):
            port.check()

    assert bound == ["10.0.0.7:0"] * calls


def test_a_head_that_takes_connections_and_says_nothing_holds_up_nobody() -> None:
    asking = """
import os, sys
from server.ray.internals import Table
table = Table(sys.argv[1], "service", timeout=0.2)
for _ in range(2):  # Ray still waits for the answer to the first
    try:
        table.get("key")
    except OSError as error:
        print(error, flush=True)
os._exit(0)
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        ended = subprocess.run(
            [sys.executable, "-c", asking, address], capture_output=True, text=True, timeout=30
        )

    said = ended.stdout.splitlines()
    assert len(said) == 2, ended.stderr
    for line in said:
        assert line.startswith(f"the Ray cluster at {address} does not answer: nothing has come")
