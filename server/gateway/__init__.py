"""The public port, and how calls find a worker."""

from __future__ import annotations

import os

# gRPC reads this when it is imported, and Ray's own gRPC in this process must not: so it is taken
# back. By default several threads of gRPC pass on all that clients and workers send: forty switches
# between threads an answer. Without them a thread of the gateway reads each connection itself, and
# a refusal costs a fifth less.
_EXPERIMENTS = "GRPC_EXPERIMENTS"
_NO_THREADS = "-event_engine_listener,-event_engine_client"


def _import_grpc() -> None:
    before = os.environ.get(_EXPERIMENTS)
    os.environ[_EXPERIMENTS] = f"{before},{_NO_THREADS}" if before else _NO_THREADS
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_EXPERIMENTS]
        if before is not None:
            os.environ[_EXPERIMENTS] = before


_import_grpc()
