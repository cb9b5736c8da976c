"""Ray Serve's own gRPC server of a replica, which nothing of ours uses, is kept to its node.

It unpickles what it is sent, and Ray binds it to every interface.
"""

from __future__ import annotations

from typing import Any

from server.listening import address_of
from server.ray.internals import other_ray, private_names


class ServePort:
    """The port of that server, to be made before Ray opens it: when a replica is being made."""

    def __init__(self) -> None:
        """Raise ConfigError if this Ray does not let it be chosen."""
        import ray

        self.host = str(ray.util.get_node_ip_address())  # the node's
        self._is_bound = False
        with private_names():
            from ray.serve._private import replica

            add_port = replica.add_port_to_grpc_server

        def add_to_node(server: Any, _address: str) -> Any:
            port = add_port(server, address_of(self.host, 0))
            self._is_bound = True
            return port

        replica.add_port_to_grpc_server = add_to_node

    def check(self) -> None:
        """Raise ConfigError if Ray has opened the port in another way; once it has opened it."""
        if not self._is_bound:
            raise other_ray(f"a replica's own port is not bound to {self.host} alone")
