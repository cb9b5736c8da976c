"""A model behind KServe v2, the Open Inference Protocol, over gRPC: answers come as wholes."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from tokenweir.open_inference import open_inference_pb2 as protocol
from tokenweir.open_inference import open_inference_pb2_grpc

from loadtest.errors import LoadTestError, NoServerError
from loadtest.target.target import CallFailed, Found, Reply, ServerSample
from loadtest.work.ask import Answer, Ask, Method

SCHEME = "kserve://"
_ASK_TIMEOUT = 10.0  # seconds for the server to say what the model is; requests have their own
_MAX_ANSWER_BYTES = 64 << 20
_UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_INTEGERS: Mapping[str, str] = {"INT32": "int_contents", "INT64": "int64_contents"}
_CONTENTS: Mapping[str, str] = {"BYTES": "bytes_contents", "FP32": "fp32_contents", **_INTEGERS}
_RAW: Mapping[str, str] = {"FP32": "<f4", "INT32": "<i4", "INT64": "<i8"}
# By what a model gives it is seen what it does; of all others BYTES is taken for a text.
_SIGNS: tuple[tuple[str, Method], ...] = (
    ("finish_reason", "generate"),
    ("start_byte", "label"),
    ("probability", "classify"),
    ("embedding", "embed"),
)
Tensor = protocol.ModelMetadataResponse.TensorMetadata


class KserveGrpc:
    """Sends texts, token ids and images to ModelInfer, one in a call, with options as parameters.

    Names and ranks of the tensors are those that ModelMetadata tells.
    """

    def __init__(
        self,
        address: str,
        model: str,
        timeout: float,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        self._address, self._model, self._timeout = address, model, timeout
        self._credentials = credentials
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel: grpc.aio.Channel | None = None  # for the running event loop
        self._told = protocol.ModelMetadataResponse()
        self._method: Method = "generate"
        self._images: dict[Path, bytes] = {}

    async def find(self) -> Found:
        """Ask what the model takes and gives; NoServerError or LoadTestError if it is not there."""
        try:
            self._told = await self._stub().ModelMetadata(
                protocol.ModelMetadataRequest(name=self._model),
                timeout=_ASK_TIMEOUT,
                metadata=self._metadata,
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in _UNANSWERED:
                raise NoServerError(
                    f"no server answers at {self._address} ({error.details()})"
                ) from error
            raise LoadTestError(
                f"the server at {self._address} does not tell of model {self._model!r}: "
                f"{error.details()}"
            ) from error
        self._method = _method(self._told.outputs)
        versions = {"python": platform.python_version(), "grpcio": version("grpcio")}
        if self._told.versions:
            versions["model"] = self._told.versions[0]
        return Found(self._method, versions)

    async def send(self, ask: Ask, *, keep: bool) -> Reply:
        """Send one request; CallFailed for an error of the server."""
        method = ask.method or self._method
        if method == "score":
            raise ValueError("the Open Inference Protocol has no call to score")
        request = protocol.ModelInferRequest(
            model_name=self._model, inputs=[self._input(ask)], outputs=self._wanted(method)
        )
        for name, value in ask.options.items():
            _set_parameter(request.parameters[name], value)
        try:
            response = await self._stub().ModelInfer(
                request, timeout=self._timeout, metadata=self._metadata
            )
            return _reply(method, response)
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            raise CallFailed(error.code().name, _reason(error), details) from error

    async def sample(self, time: float) -> ServerSample | None:
        """Return None: the protocol does not say how busy a server is."""
        return None

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()

    def _stub(self) -> open_inference_pb2_grpc.GRPCInferenceServiceAsyncStub:
        if self._channel is None:
            options = (("grpc.max_receive_message_length", _MAX_ANSWER_BYTES),)
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self._address, options)
            else:
                self._channel = grpc.aio.secure_channel(self._address, self._credentials, options)
        return open_inference_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _wanted(
        self, method: Method
    ) -> Iterable[protocol.ModelInferRequest.InferRequestedOutputTensor]:
        """Return the outputs to ask for: only where a model has another task first.

        Raises ValueError for a task that none of its outputs is of.
        """
        if method == self._method:
            return []
        signs = [sign for sign, one in _SIGNS if one == method]
        told = [output.name for output in self._told.outputs]
        if not (names := [name for name in told if name in signs]):
            raise ValueError(
                f"{self._model!r} does not {method}: it gives {', '.join(told)}, and none of "
                f"{', '.join(signs)}"
            )
        return [protocol.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in names]

    def _input(self, ask: Ask) -> protocol.ModelInferRequest.InferInputTensor:
        """Return the prompt in the first input that can have it."""
        prompt = ask.prompt
        if ask.is_chat:
            raise ValueError("a conversation cannot be sent by the Open Inference Protocol")
        if isinstance(prompt, tuple):
            told = self._first(_INTEGERS)
            field, values = _INTEGERS[told.datatype], [*prompt]
        else:
            told = self._first(("BYTES",))
            field, values = "bytes_contents", [self._encoded(prompt, told.name)]
        rank = max(1, len(told.shape))
        tensor = protocol.ModelInferRequest.InferInputTensor(
            name=told.name, datatype=told.datatype, shape=[*[1] * (rank - 1), len(values)]
        )
        getattr(tensor.contents, field).extend(values)
        return tensor

    def _first(self, datatypes: Iterable[str]) -> Tensor:
        known = [*datatypes]
        for told in self._told.inputs:
            if told.datatype in known:
                return told
        raise LoadTestError(
            f"model {self._model!r} takes no {' or '.join(known)}; its inputs are: "
            + ", ".join(f"{told.name} {told.datatype}" for told in self._told.inputs)
        )

    def _encoded(self, prompt: str | Path, name: str) -> bytes:
        if not isinstance(prompt, Path):
            if name != "image":
                return prompt.encode()
            prompt = Path(prompt)
        if prompt not in self._images:
            try:
                self._images[prompt] = prompt.read_bytes()
            except OSError as error:
                raise LoadTestError(
                    f"{self._model!r} is asked of an image file: {error}"
                ) from error
        return self._images[prompt]


def _method(outputs: Sequence[Tensor]) -> Method:
    names = {output.name for output in outputs}
    for sign, method in _SIGNS:
        if sign in names:
            return method
    return "generate" if any(output.datatype == "BYTES" for output in outputs) else "embed"


def _set_parameter(parameter: protocol.InferParameter, value: object) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case int():
            parameter.int64_param = value
        case float():
            parameter.double_param = value
        case str():
            parameter.string_param = value
        case _:
            parameter.string_param = json.dumps(value)


def _reply(method: Method, response: protocol.ModelInferResponse) -> Reply:
    found = {output.name: _values(response, place) for place, output in enumerate(response.outputs)}
    counts = response.parameters
    texts = found.get("finish_reason", [])
    return Reply(
        input_tokens=counts["input_tokens"].int64_param if "input_tokens" in counts else 0,
        output_tokens=counts["output_tokens"].int64_param if "output_tokens" in counts else 0,
        finish_reason=texts[0] if texts else "",
        answer=_answer(method, found),
    )


def _answer(method: Method, found: Mapping[str, list[Any]]) -> Answer:
    """Return an answer in the form that those of our own protocol have, as far as it goes."""
    match method:
        case "generate":
            text = found.get("text") or next(filter(_is_text, found.values()), [""])
            reasons = found.get("finish_reason")
            return {"text": text[0]} | ({"finish_reason": reasons[0]} if reasons else {})
        case "classify" if "probability" in found and "label" in found:
            pairs = zip(found["label"], found["probability"], strict=True)
            return {"labels": [[label, value] for label, value in pairs]}
        case "label" if "start_byte" in found:
            names = ("start_byte", "end_byte", "label", "probability")
            return {
                "spans": [list(span) for span in zip(*(found[name] for name in names), strict=True)]
            }
    vectors = (values for values in found.values() if not _is_text(values))
    return {"values": next(vectors, [])}


def _is_text(values: Sequence[Any]) -> bool:
    return bool(values) and isinstance(values[0], str)


def _values(response: protocol.ModelInferResponse, place: int) -> list[Any]:
    """Return the values of an output; CallFailed for what this protocol does not have."""
    output = response.outputs[place]
    if output.datatype not in _CONTENTS:
        return []
    if not response.raw_output_contents:
        values = getattr(output.contents, _CONTENTS[output.datatype])
        return [one.decode(errors="replace") for one in values] if _is_bytes(output) else [*values]
    data = response.raw_output_contents[place]
    if not _is_bytes(output):
        found: list[Any] = np.frombuffer(data, _RAW[output.datatype]).tolist()
        return found
    return [one.decode(errors="replace") for one in _elements(data)]


def _is_bytes(output: protocol.ModelInferResponse.InferOutputTensor) -> bool:
    return output.datatype == "BYTES"


def _elements(data: bytes) -> Iterable[bytes]:
    start = 0
    while start < len(data):
        size = int.from_bytes(data[start : start + 4], "little")
        yield data[start + 4 : start + 4 + size]
        start += 4 + size


def _reason(error: grpc.aio.AioRpcError) -> str:
    """Return the reason that the details give; servers of others need not have any."""
    info = error_details_pb2.ErrorInfo()
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            if detail.Unpack(info):
                return str(info.reason)
    except (ValueError, DecodeError):
        pass
    return ""
