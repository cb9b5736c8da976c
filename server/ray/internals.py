"""Private names of Ray: all that are called or replaced here, as the Ray of VERSION has them.

A name that is gone is told with Ray's version. tests/server/ray/test_internals.py fails for another
version until somebody has looked at these names again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from engine.errors import ConfigError
from server.listening import address_of
from server.ray.address import connect_once, not_joined

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


class ServePort:
    """The port of Ray Serve's own gRPC server of a replica, which is kept to its node.

    It unpickles what it is sent, nothing of ours uses it, and Ray binds it to every interface.
    """

    def __init__(self) -> None:
        """To be made before Ray opens it: when a replica is being made."""
        import ray

        with private_names():
            from ray.serve._private import replica

            add_port = replica.add_port_to_grpc_server

        self.host = str(ray.util.get_node_ip_address())  # the node's
        self._is_bound = False

        def add_to_node(server: Any, _address: str) -> Any:
            port = add_port(server, address_of(self.host, 0))
            self._is_bound = True
            return port

        replica.add_port_to_grpc_server = add_to_node

    def check(self) -> None:
        """Raise ConfigError if Ray has opened the port in another way; once it has opened it."""
        if not self._is_bound:
            raise other_ray(f"a replica's own port is not bound to {self.host} alone")


# Called


class Table:
    """Part of the table of keys of a Ray cluster; this process may be no part of the cluster.

    Each call raises OSError if the cluster does not answer.
    """

    def __init__(self, ray_address: str, name: str, timeout: float = _TIMEOUT) -> None:
        """Keys are those of this part; an answer has `timeout` seconds to come."""
        self._address = ray_address
        self._name = f"tokenweir+{name}".encode()  # Ray allows no ":" here
        self._timeout = timeout
        self._client: Any = None
        self._asking = threading.Lock()  # one at a time

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> None:
        """Write a value, over another one or only if there is none."""
        self._ask("internal_kv_put", key.encode(), value, overwrite, self._name)

    def get(self, key: str) -> bytes | None:
        """Return a value."""
        found: bytes | None = self._ask("internal_kv_get", key.encode(), self._name)
        return found

    def delete(self, key: str) -> None:
        """Delete a value."""
        self._ask("internal_kv_del", key.encode(), False, self._name)

    def read(self) -> dict[str, bytes]:
        """Return all values by their keys."""
        keys = self._ask("internal_kv_keys", b"", self._name)
        found = self._ask("internal_kv_multi_get", keys, self._name) if keys else {}
        return {key.decode(errors="replace"): value for key, value in found.items()}

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Return the answer; OSError if it does not come in time, however long Ray waits for it.

        To connect to a head that takes connections and says nothing takes Ray 40 s.
        """
        import ray  # noqa: F401  # takes seconds, which do not count

        answer: Future[Any] = Future()

        def ask() -> None:
            with self._asking:
                if not answer.set_running_or_notify_cancel():  # nobody waits any more
                    return
                try:
                    answer.set_result(self._answer(method, *arguments))
                except Exception as error:  # noqa: BLE001  # its caller raises it
                    answer.set_exception(error)

        # A daemon: the process may end meanwhile.
        threading.Thread(target=ask, name="table of keys", daemon=True).start()
        try:
            return answer.result(self._timeout)
        except TimeoutError as error:
            if answer.done():  # it is of the connection
                raise
            answer.cancel()
            late = TimeoutError(f"nothing has come within {self._timeout:g} s")
            raise OSError(not_joined(self._address, late)) from error

    def _answer(self, method: str, *arguments: Any) -> Any:
        import ray

        try:
            with private_names():
                from ray._raylet import GcsClient  # type: ignore[attr-defined]

                if self._client is None:
                    connect_once(self._address)  # Ray would try for 40 s if nobody listens
                    self._client = GcsClient(address=self._address)
                return getattr(self._client, method)(*arguments, self._timeout)
        except (ray.exceptions.RayError, RuntimeError) as error:
            self._client = None  # one that finds no cluster for 60 s ends the process
            raise OSError(not_joined(self._address, error)) from error
