"""Everything that a run needs to go on exactly where it stopped, in one safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.optim.swa_utils import AveragedModel

from engine.errors import CheckpointError
from exporter.checkpoint import load_weights, unique_weights
from exporter.files import replace_file, writing_to

STATE_NAME = "training_state.safetensors"
STATE_FORMAT_VERSION = 1
_METADATA_KEY = "training_state"
_MODEL, _AVERAGE, _OPTIMIZER, _RNG = "model.", "average.", "optimizer.", "rng"


class RunState(BaseModel):
    """The part of the state that is not tensors; JSON in the file's header."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Annotated[int, Field(gt=0)] = STATE_FORMAT_VERSION
    task: str
    seed: int
    fingerprint: str  # configuration, recipe, tokenizer and data; a resumed run has the same
    steps: Annotated[int, Field(gt=0)]  # that the run is to have in the end
    step: Annotated[int, Field(ge=0)] = 0  # updates done
    chunk: Annotated[int, Field(ge=0)] = 0  # position in the data
    batch: Annotated[int, Field(ge=0)] = 0
    best: tuple[float, float] | None = None  # score of the best checkpoint; larger is better
    best_step: Annotated[int, Field(ge=0)] = 0
    seconds: Annotated[float, Field(ge=0)] = 0.0  # spent in training, over all sittings
    finished: bool = False


def save_state(
    directory: Path,
    state: RunState,
    model: nn.Module,
    average: AveragedModel,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write the state by one rename: a run that is killed at any moment can be resumed."""
    tensors = {_MODEL + name: tensor for name, tensor in unique_weights(model).items()}
    tensors |= {_AVERAGE + name: tensor for name, tensor in unique_weights(average).items()}
    tensors |= {
        f"{_OPTIMIZER}{key}.{name}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    tensors[_RNG] = torch.get_rng_state()
    metadata = {_METADATA_KEY: state.model_dump_json()}
    with writing_to(directory):
        replace_file(directory / STATE_NAME, safetensors.torch.save(tensors, metadata))


def read_state(directory: Path) -> RunState:
    """Return how far the run in `directory` has come."""
    path = directory / STATE_NAME
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {STATE_NAME}: there is no run to resume")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return RunState.model_validate_json(metadata.get(_METADATA_KEY, "{}"))
    except (SafetensorError, ValidationError) as error:
        raise _damaged(path, error) from error


def restore_state(
    directory: Path, model: nn.Module, average: AveragedModel, optimizer: torch.optim.Optimizer
) -> None:
    """Load weights, their average, optimizer and random numbers of the run in `directory`."""
    path = directory / STATE_NAME
    try:
        tensors = safetensors.torch.load_file(path)
        load_weights(model, _below(tensors, _MODEL), path=path)
        load_weights(average, _below(tensors, _AVERAGE), path=path)
        parameters = dict(model.named_parameters())
        for full_name, tensor in _below(tensors, _OPTIMIZER).items():
            key, name = full_name.split(".", 1)
            optimizer.state[parameters[name]][key] = tensor
        torch.set_rng_state(tensors[_RNG])
    # Tensors that are not there, have other names, shapes or number formats.
    except (SafetensorError, OSError, LookupError, ValueError, TypeError, RuntimeError) as error:
        raise _damaged(path, error) from error


def _below(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged or of another release: {error}; start the run anew in another directory"
    )
