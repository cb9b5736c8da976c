"""Private names of Ray: all that are called or replaced here, as the Ray of VERSION has them.

A name that is gone is told with Ray's version. tests/server/ray/test_internals.py fails for another
version until somebody has looked at these names again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.errors import ConfigError

VERSION = "2.60"
_TIMEOUT = 5.0  # seconds for an answer of the table of keys


@contextmanager
def private_names() -> Iterator[None]:
    """Raise ConfigError for a name that this Ray does not have."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise other_ray(str(error)) from error


def other_ray(difference: str) -> ConfigError:
    """Return what to raise about a Ray that is built in another way."""
    import ray

    return ConfigError(
        f"Ray {ray.__version__} is not built as Ray {VERSION}, which Tokenweir uses from inside: "
        f"{difference}; install a version that the extra `serve` allows"
    )


# Replaced


def run_ray_command() -> None:
    """Run Ray's command with the arguments of this process, as a Ray that has no dashboard.

    Ray takes itself for one without its extras where gRPC is missing: then it starts no server of
    Ray clients, and an agent that opens no port. The server of the dashboard is started even so.
    """
    sys.modules["grpc"] = None  # type: ignore[assignment]  # an import of it fails
    with private_names():
        from ray._private.node import Node
        from ray.scripts.scripts import main

        _ = Node.start_api_server
    Node.start_api_server = lambda *_, **__: None
    main()


def bind_serve_port(address: str, bound: Callable[[], None]) -> None:
    """Have Ray Serve bind the gRPC server of a replica to this address, and tell `bound` then.

    It unpickles what it is sent, nothing of ours uses it, and Ray binds it to every interface.
    """
    with private_names():
        from ray.serve._private import replica

        add_port = replica.add_port_to_grpc_server

    def add_to_address(server: Any, _address: str) -> Any:
        port = add_port(server, address)
        bound()
        return port

    replica.add_port_to_grpc_server = add_to_address


# Called: Ray's table of keys, of the cluster that this process is connected to


def put(key: bytes, value: bytes, namespace: str) -> None:
    """Write a value, over another one."""
    with private_names():
        from ray.experimental.internal_kv import _internal_kv_put
    _internal_kv_put(key, value, overwrite=True, namespace=namespace)


def get(key: bytes, namespace: str) -> bytes | None:
    """Return a value."""
    with private_names():
        from ray.experimental.internal_kv import _internal_kv_get
    found: bytes | None = _internal_kv_get(key, namespace=namespace)
    return found


def delete(key: bytes, namespace: str) -> None:
    """Delete a value."""
    with private_names():
        from ray.experimental.internal_kv import _internal_kv_del
    _internal_kv_del(key, namespace=namespace)


def get_at(ray_address: str, key: bytes, namespace: str) -> bytes | None:
    """Return a value of a cluster that this process is no part of.

    Raises RayError or RuntimeError if the cluster does not answer.
    """
    with private_names():
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
    found: bytes | None = GcsClient(address=ray_address).internal_kv_get(
        key, namespace.encode(), timeout=_TIMEOUT
    )
    return found
