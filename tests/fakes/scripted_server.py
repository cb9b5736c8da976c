"""A real gRPC server on a loopback port whose answers are functions that a test sets."""

from __future__ import annotations

import threading
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
from tokenweir.open_inference import open_inference_pb2_grpc
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
_SERVICES = (
    (generation_service_pb2_grpc, "GenerationService"),
    (prediction_service_pb2_grpc, "PredictionService"),
    (admin_service_pb2_grpc, "AdminService"),
    (health_pb2_grpc, "Health"),
    (open_inference_pb2_grpc, "GRPCInferenceService"),
)


class ScriptedServer:
    """Answers every RPC, KServe's too, with the function set under its name; keeps the requests."""

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
    for module, name in _SERVICES:
        service = _scripted(getattr(module, f"{name}Servicer"), script)
        getattr(module, f"add_{name}Servicer_to_server")(service, server)
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


def breaking_stream(
    piece: str, code: grpc.StatusCode, message: str
) -> tuple[Answer, threading.Event]:
    """Return an answer that fails behind its first piece, and the event that it waits for."""
    read = threading.Event()

    def answer(request: object, context: grpc.ServicerContext) -> Iterator[StreamMessage]:
        yield next(stream_messages([piece]))
        read.wait(60)
        fail(context, code, message)

    return answer, read


def _scripted(service: type, script: ScriptedServer) -> object:
    """Return a service whose every method is the script's."""

    def method(name: str) -> Callable[..., object]:
        def whole(self: object, request: Message, context: grpc.ServicerContext) -> object:
            return script.answer(name, request, context)

        def streamed(self: object, request: Message, context: grpc.ServicerContext) -> object:
            yield from script.answer(name, request, context)

        def one_of(
            self: object, requests: Iterator[Message], context: grpc.ServicerContext
        ) -> object:
            yield from script.answer(name, next(requests), context)

        return {"GenerateStream": streamed, "ModelStreamInfer": one_of}.get(name, whole)

    names = [name for name in vars(service) if name[0].isupper()]
    return type("Scripted", (service,), {name: method(name) for name in names})()
