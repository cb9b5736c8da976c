"""A real gRPC server on a loopback port whose answers are functions that a test sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NoReturn

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status
from tokenweir.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    common_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
    prediction_service_pb2_grpc,
)

StreamMessage = generation_service_pb2.GenerateStreamResponse
Answer = Callable[..., object]


class ScriptedServer:
    """Answers every RPC with the function set under its name, and remembers the requests."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[Message] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.answers: dict[str, Answer] = {"ListModels": list_models("m")}

    def answer(self, rpc: str, request: Message, context: grpc.ServicerContext) -> object:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if rpc not in self.answers:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"no script for {rpc}")
        return self.answers[rpc](request, context)


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """Run a ScriptedServer for the time of a `with` block."""
    script = ScriptedServer()
    server = grpc.server(ThreadPoolExecutor(max_workers=64))
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(_Generation(script), server)
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(_Prediction(script), server)
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(_Admin(script), server)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(script), server)
    script.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield script
    finally:
        server.stop(grace=None).wait()


def fail(
    context: grpc.ServicerContext, code: grpc.StatusCode, message: str, *details: Message
) -> NoReturn:
    """End a call with a google.rpc.Status that has `details`."""
    packed = []
    for detail in details:
        packed.append(Any())
        packed[-1].Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort raises")


def list_models(
    *names: str, capabilities: Sequence[str] = ("generate",), architecture: str = ""
) -> Answer:
    """Return an answer for ListModels."""
    infos = [
        admin_service_pb2.ModelInfo(
            model=name,
            state=admin_service_pb2.MODEL_STATE_READY,
            capabilities=capabilities,
            architecture=architecture,
        )
        for name in names
    ]
    return lambda request, context: admin_service_pb2.ListModelsResponse(models=infos)


def stream_messages(pieces: Sequence[str], request_id: str = "r") -> Iterator[StreamMessage]:
    """Yield the messages of a well-formed stream, one token a piece, ids from 1."""
    number = 0
    for number, piece in enumerate(pieces, start=1):
        yield StreamMessage(
            sequence_number=number,
            delta=StreamMessage.Delta(text=piece, tokens=common_pb2.TokenIds(ids=[number])),
        )
    yield StreamMessage(
        sequence_number=number + 1,
        finished=StreamMessage.Finished(
            finish_reason=common_pb2.FINISH_REASON_EOS, sum_logprob=-1.5
        ),
    )
    timing = common_pb2.Timing(steps=len(pieces), mean_batch_size=2.0)
    timing.queue.FromMilliseconds(3)
    yield StreamMessage(
        sequence_number=number + 2,
        summary=StreamMessage.Summary(
            request_id=request_id,
            usage=common_pb2.Usage(input_tokens=4, output_tokens=len(pieces)),
            timing=timing,
            provenance=common_pb2.Provenance(model="m", model_version="7", seed=11),
        ),
    )


class _Servicer:
    def __init__(self, script: ScriptedServer) -> None:
        self._script = script


class _Generation(_Servicer):
    def Generate(self, request, context):
        return self._script.answer("Generate", request, context)

    def GenerateStream(self, request, context):
        yield from self._script.answer("GenerateStream", request, context)

    def Score(self, request, context):
        return self._script.answer("Score", request, context)


class _Prediction(_Servicer):
    def Classify(self, request, context):
        return self._script.answer("Classify", request, context)

    def Label(self, request, context):
        return self._script.answer("Label", request, context)

    def Embed(self, request, context):
        return self._script.answer("Embed", request, context)


class _Admin(_Servicer):
    def GetServerInfo(self, request, context):
        return self._script.answer("GetServerInfo", request, context)

    def ListModels(self, request, context):
        return self._script.answer("ListModels", request, context)

    def GetLoad(self, request, context):
        return self._script.answer("GetLoad", request, context)

    def LoadModel(self, request, context):
        return self._script.answer("LoadModel", request, context)

    def UnloadModel(self, request, context):
        return self._script.answer("UnloadModel", request, context)

    def SetTraffic(self, request, context):
        return self._script.answer("SetTraffic", request, context)

    def AbortRequests(self, request, context):
        return self._script.answer("AbortRequests", request, context)

    def Drain(self, request, context):
        return self._script.answer("Drain", request, context)


class _Health(health_pb2_grpc.HealthServicer):
    def __init__(self, script: ScriptedServer) -> None:
        self._script = script

    def Check(self, request, context):
        return self._script.answer("Check", request, context)
