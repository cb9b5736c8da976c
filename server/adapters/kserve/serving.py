"""Runs the KServe server until its task is cancelled."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio
from tokenweir import AsyncClient
from tokenweir.open_inference import open_inference_pb2_grpc

from server.adapters.config import KserveConfig
from server.adapters.kserve.health import HEALTH, SERVICE, health_handler
from server.adapters.kserve.inference import Inference
from server.adapters.kserve.reading import Reading
from server.adapters.kserve.service import KserveService
from server.auth.tls import server_credentials
from server.calls.reflection import enable_reflection
from server.listening import (
    address_of,
    connection_options,
    listen,
    max_connections,
)


async def serve(client: AsyncClient, config: KserveConfig, announce: Callable[[str], None]) -> None:
    """Serve, having told `announce` the address; when cancelled, let open requests end first.

    Raises ConfigError for a port or a certificate that cannot be had.
    """
    server = grpc.aio.server(
        interceptors=(
            Reading(config.max_open_bytes, config.max_request_bytes, config.max_requests),
        ),
        options=(
            *connection_options(max_connections(config.host)),
            ("grpc.so_reuseport", 0),  # else a second server on the port takes half of the calls
            ("grpc.max_receive_message_length", config.max_request_bytes),
            ("grpc.max_metadata_size", 64 * 2**10),
        ),
    )
    inference = Inference(client, config.timeout)
    service = KserveService(client, inference, config)
    open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    server.add_generic_rpc_handlers([health_handler(inference)])
    enable_reflection((SERVICE, HEALTH), server)
    port = listen(server, config.host, config.port, server_credentials(config.tls))
    await server.start()
    announce(address_of(config.host, port))
    try:
        await server.wait_for_termination()
    finally:
        service.stop_reading()
        await server.stop(config.grace)
