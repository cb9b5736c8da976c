"""Runs the KServe server until its task is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from tokenweir import AsyncClient
from tokenweir.open_inference import open_inference_pb2 as protocol
from tokenweir.open_inference import open_inference_pb2_grpc

from server.adapters.config import KserveConfig
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

_SERVICE = protocol.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


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
    server.add_generic_rpc_handlers([_health_handler(inference)])
    enable_reflection((_SERVICE, _HEALTH), server)
    port = listen(server, config.host, config.port, server_credentials(config.tls))
    await server.start()
    announce(address_of(config.host, port))
    try:
        await server.wait_for_termination()
    finally:
        service.stop_reading()
        await server.stop(config.grace)


def _health_handler(inference: Inference) -> grpc.GenericRpcHandler:
    """Return what answers Check; without Watch, which clients may do without.

    The names are "" and that of the service for the server behind, and those of models.
    """

    async def check(
        request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        name = "" if request.service == _SERVICE else request.service
        serves = await inference.is_serving(name)
        return health_pb2.HealthCheckResponse(status="SERVING" if serves else "NOT_SERVING")

    handler = grpc.unary_unary_rpc_method_handler(
        check,
        request_deserializer=health_pb2.HealthCheckRequest.FromString,
        response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(_HEALTH, {"Check": handler})
