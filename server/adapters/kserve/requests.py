"""Requests to run a model, as they come over gRPC and over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenweir.open_inference import open_inference_pb2 as protocol

from server.adapters.kserve.errors import Refused, short
from server.adapters.kserve.tasks import Answered
from server.adapters.kserve.tensors import Tensor, read_inputs

# Triton's clients ask by it for a last piece, also where it would be empty; ours never is.
_EMPTY_LAST = "triton_enable_empty_final_response"


@dataclass(frozen=True)
class InferRequest:
    """A request to run a model, read."""

    model: str
    version: str  # empty: the one that the server chooses
    id: str  # empty: the server makes one
    parameters: Mapping[str, Any]
    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]  # none: those of the model's first task


def read_message(request: protocol.ModelInferRequest) -> InferRequest:
    """Return the request of a message; Refused for one that says no values."""
    return InferRequest(
        request.model_name,
        request.model_version,
        request.id,
        _parameters(request),
        read_inputs(request),
        tuple(output.name for output in request.outputs),
    )


def parameters_of(found: Answered) -> dict[str, str | int]:
    """Return the parameters of an answer; none of a piece before the last."""
    if found.usage is None:
        return {}
    return {
        "input_tokens": found.usage.input_tokens,
        "output_tokens": found.usage.output_tokens,
        "request_id": found.request_id,
    }


def _parameters(request: protocol.ModelInferRequest) -> dict[str, Any]:
    found = {}
    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise Refused(f"parameter {short(name)} has no value")
        found[name] = getattr(parameter, kind)
    found.pop(_EMPTY_LAST, None)
    return found
