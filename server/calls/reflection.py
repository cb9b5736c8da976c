"""Reflection as clients ask for it: grpc.reflection.v1, and v1alpha, which older ones know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA = reflection.SERVICE_NAME
V1 = "grpc.reflection.v1.ServerReflection"
REFLECTION = (V1, V1ALPHA)

_V1_FILE = "grpc/reflection/v1/reflection.proto"


class _Server(Protocol):
    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler], /) -> None: ...


def enable_reflection(services: Iterable[str], server: _Server) -> None:
    """Serve reflection of `services`, in both versions."""
    names = (*services, *REFLECTION)
    _describe_v1()
    # Both versions have the same messages, under other names.
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, methods) for name in REFLECTION]
    )


def _describe_v1() -> None:
    """Register the descriptors of v1 too; grpcio has those of v1alpha only."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_V1_FILE)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        text = text_format.MessageToString(file).replace("v1alpha", "v1")
        pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
