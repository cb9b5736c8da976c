"""Ray Serve's own gRPC server of a replica, which nothing of ours uses, is kept to its node."""

from __future__ import annotations

from server.listening import address_of
from server.ray.internals import bind_serve_port, other_ray


class ServePort:
    """The port of that server, to be made before Ray opens it: when a replica is being made."""

    def __init__(self) -> None:
        """Raise ConfigError if this Ray does not let it be chosen."""
        import ray

        self.host = str(ray.util.get_node_ip_address())  # the node's
        self._is_bound = False
        bind_serve_port(address_of(self.host, 0), self._bound)

    def check(self) -> None:
        """Raise ConfigError if Ray has opened the port in another way; once it has opened it."""
        if not self._is_bound:
            raise other_ray(f"a replica's own port is not bound to {self.host} alone")

    def _bound(self) -> None:
        self._is_bound = True
