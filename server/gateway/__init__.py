"""The public port, and how calls find a worker."""

from __future__ import annotations

import os

# gRPC reads this when it is imported, and Ray's own gRPC in this process must not: so it is taken
# back. By default several threads of gRPC pass every call on to the one that the gateway waits in;
# without them that one reads the connections itself, and a refusal costs a fifth less.
_EXPERIMENTS, _OWN_LISTENER = "GRPC_EXPERIMENTS", "-event_engine_listener"


def _import_grpc() -> None:
    before = os.environ.get(_EXPERIMENTS)
    os.environ[_EXPERIMENTS] = f"{before},{_OWN_LISTENER}" if before else _OWN_LISTENER
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_EXPERIMENTS]
        if before is not None:
            os.environ[_EXPERIMENTS] = before


_import_grpc()
