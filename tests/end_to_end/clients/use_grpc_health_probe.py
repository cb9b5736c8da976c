"""The call of grpc-health-probe, by gRPC's own package for health."""

import sys

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

with grpc.insecure_channel(sys.argv[1]) as channel:
    for service in ("", "assistant", "embedder"):
        found = HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=10)
        assert found.status == HealthCheckResponse.SERVING
