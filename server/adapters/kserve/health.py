"""The health of the server behind, and of its models, as grpc.health.v1 is asked for it."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from tokenweir.open_inference import open_inference_pb2 as protocol

from server.adapters.kserve.inference import Inference

SERVICE = protocol.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


def health_handler(inference: Inference) -> grpc.GenericRpcHandler:
    """Return what answers Check; without Watch, which clients may do without.

    The names are "" and that of the service for the server behind, and those of models.
    """

    async def check(
        request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        name = "" if request.service == SERVICE else request.service
        serves = await inference.is_serving(name)
        return health_pb2.HealthCheckResponse(status="SERVING" if serves else "NOT_SERVING")

    handler = grpc.unary_unary_rpc_method_handler(
        check,
        request_deserializer=health_pb2.HealthCheckRequest.FromString,
        response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(HEALTH, {"Check": handler})
