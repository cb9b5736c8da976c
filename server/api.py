"""Names of the API: release, revision, services and methods, metadata that servers add."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from tokenweir.v1 import admin_service_pb2, generation_service_pb2, prediction_service_pb2

from server.calls.reflection import REFLECTION

RELEASE = metadata.version("tokenweir")
API_MINOR = 6

_FILES = (generation_service_pb2, prediction_service_pb2, admin_service_pb2)
GENERATION = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
PREDICTION = prediction_service_pb2.DESCRIPTOR.services_by_name["PredictionService"].full_name
ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVICES = (GENERATION, PREDICTION, ADMIN)
FEATURES = (HEALTH, *REFLECTION)
METHODS: Mapping[str, MethodDescriptor] = {  # by path
    f"/{service.full_name}/{method.name}": method
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}

REPLICA_KEY = "tokenweir-replica"  # initial metadata: sent on admission, so it is never empty
