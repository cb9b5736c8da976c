"""The two models that are compared where they answer in one pass: a package, or an eager model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.factory import device_of
from engine.one_pass.batch import split, stack
from engine.one_pass.item_encoder import EncodedItem
from engine.one_pass.prediction import ItemPrediction
from engine.package.graph_io import INPUT_IDS, PIXEL_VALUES, TOKEN_TYPE_IDS
from engine.package.package import MANIFEST_NAME, load_package, read_manifest
from engine.session import create_session
from exporter.checkpoint import load_checkpoint, read_config
from exporter.graphs.contracts import Contract, contract_of
from exporter.prover.driver import predict
from exporter.prover.item_cases import run_eager


class Predictor(Protocol):
    """A model that is asked what it says of texts or pictures."""

    path: Path
    contract: Contract

    def predict(self, items: Sequence[EncodedItem]) -> list[ItemPrediction | None]:
        """Return what it says of items of one length; None stands for one that is not finite."""


def generates(path: Path) -> bool:
    """Say whether the model in a directory, a package or a checkpoint, generates.

    Raises PackageError or CheckpointError for a directory that is neither.
    """
    if (path / MANIFEST_NAME).is_file():
        return read_manifest(path).generation is not None
    return contract_of(read_config(path).model).generation is not None


def open_predictor(path: Path) -> Predictor:
    """Return the model in a directory, a package or a checkpoint.

    Raises ConfigError for one that generates, PackageError and CheckpointError.
    """
    if generates(path):
        raise ConfigError(f"{path} holds a model that generates; give two that do, or none")
    is_package = (path / MANIFEST_NAME).is_file()
    return ExportedPredictor(path) if is_package else EagerPredictor(path)


class ExportedPredictor:
    """A package, run on the CPU as the engine runs it."""

    def __init__(self, path: Path) -> None:
        package = load_package(path)
        device_of(
            package.manifest, package.path, EngineConfig(device="cpu")
        )  # PackageError, if a CPU has no kernels
        self.path = path
        of_both = (field.name for field in fields(Contract))
        self.contract = Contract(**{name: getattr(package.manifest, name) for name in of_both})
        self._session = create_session(package.file("model.onnx"))

    def predict(self, items: Sequence[EncodedItem]) -> list[ItemPrediction | None]:
        """See Predictor."""
        return split(predict(self._session, items), items)


class EagerPredictor:
    """A checkpoint, run by PyTorch without a mask, for no item is padded."""

    def __init__(self, path: Path) -> None:
        checkpoint = load_checkpoint(path)
        self.path = path
        self.contract = contract_of(checkpoint.config.model)
        self._model = checkpoint.model

    def predict(self, items: Sequence[EncodedItem]) -> list[ItemPrediction | None]:
        """See Predictor."""
        given = {name: torch.from_numpy(values) for name, values in stack(items).items()}
        if PIXEL_VALUES in given:
            output = run_eager(self._model, (given[PIXEL_VALUES],))
        elif TOKEN_TYPE_IDS in given:
            output = run_eager(self._model, (given[INPUT_IDS], None, given[TOKEN_TYPE_IDS]))
        else:
            output = run_eager(self._model, (given[INPUT_IDS],))
        found = output._asdict().items()
        return split({name: part.numpy() for name, part in found if part is not None}, items)
