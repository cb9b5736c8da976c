"""The checkpoint that a task starts from, where a person gives one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from engine.errors import ConfigError
from engine.package.manifest import Architecture
from exporter.checkpoint import Checkpoint, unique_weights
from exporter.models.config import TransformerConfig

FINE_TUNING = 0.1  # share of the learning rate from fresh weights
_HEADS = ("classifier.", "distillation_classifier.")  # how the names of weights begin


def of_architecture(start: Checkpoint | None, architecture: Architecture) -> Checkpoint | None:
    """Return the checkpoint to go on from; ConfigError if it is of another architecture."""
    if start is not None and (found := start.config.model.architecture) != architecture:
        raise ConfigError(
            f"{start.path} holds a model of the architecture {found}, this task starts from "
            f"{architecture}; give a checkpoint of that architecture"
        )
    return start


def kept_weights(start: Checkpoint, config: TransformerConfig) -> dict[str, Tensor]:
    """Return the weights to start from: a head that tells other labels is none of them."""
    weights, before = unique_weights(start.model), start.config.model
    if (config.head.each_token, config.labels) == (before.head.each_token, before.labels):
        return weights
    return {name: one for name, one in weights.items() if not name.startswith(_HEADS)}


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """Return a digest of weights and their names."""
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(name.encode() + b"\0" + weight.numpy().tobytes())
    return digest.hexdigest()
