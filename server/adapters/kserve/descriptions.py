"""Models as the protocol describes them, in the names of its messages and of its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from types import MappingProxyType
from typing import Any

from tokenweir import ModelInfo

from server.adapters.kserve.tasks import Named, inputs_of, tasks_of

_PLATFORM, _BACKEND = "tokenweir_onnx", "tokenweir"
_DATA_TYPES: Mapping[str, str] = MappingProxyType({"BYTES": "TYPE_STRING"})  # others as they are


def server_metadata() -> dict[str, Any]:
    """Return what ServerMetadata tells."""
    return {
        "name": "tokenweir",
        "version": metadata.version("tokenweir"),
        "extensions": [
            "binary_tensor_data",
            "model_configuration",
            "model_repository",
            "statistics",
        ],
    }


def metadata_of(model: ModelInfo, versions: Sequence[str]) -> dict[str, Any]:
    """Return what ModelMetadata tells of a model; inputs and outputs are over all of its tasks."""
    return {
        "name": model.model,
        "versions": list(versions),
        "platform": _PLATFORM,
        "inputs": list(map(_tensor, inputs_of(model))),
        "outputs": list(map(_tensor, _outputs_of(model))),
    }


def config_of(model: ModelInfo) -> dict[str, Any]:
    """Return what ModelConfig tells of a model."""
    inputs = inputs_of(model)
    is_optional = {"optional": True} if len(inputs) > 1 else {}  # one of several is to be given
    return {
        "name": model.model,
        "platform": _PLATFORM,
        "backend": _BACKEND,
        "max_batch_size": 0,  # shapes have the dimension of the items
        "input": [{**_configured(one), **is_optional} for one in inputs],
        "output": list(map(_configured, _outputs_of(model))),
        "model_transaction_policy": {"decoupled": "generate" in model.capabilities},
    }


def index_of(models: Sequence[ModelInfo], *, ready: bool) -> list[dict[str, Any]]:
    """Return what RepositoryIndex tells of models; `ready`: of those alone that serve."""
    return [
        {
            "name": model.model,
            "version": model.model_version,
            "state": "READY" if model.state == "ready" else "UNAVAILABLE",
            "reason": "" if model.state == "ready" else model.message or model.state,
        }
        for model in models
        if model.state == "ready" or not ready
    ]


def _outputs_of(model: ModelInfo) -> list[Named]:
    by_name = {one.name: one[:3] for task in tasks_of(model) for one in task.outputs}
    return list(by_name.values())


def _tensor(named: Named) -> dict[str, Any]:
    name, datatype, shape = named
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def _configured(named: Named) -> dict[str, Any]:
    name, datatype, shape = named
    data_type = _DATA_TYPES.get(datatype, f"TYPE_{datatype}")
    return {"name": name, "data_type": data_type, "dims": list(shape)}
