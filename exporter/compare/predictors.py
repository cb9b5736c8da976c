"""The two models that are compared where they answer in one pass: a package, or an eager model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

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
from exporter.prover.eager import Floats
from exporter.prover.item_cases import run_eager

Outputs = Mapping[str, Floats]


@dataclass(frozen=True)
class Predictor:
    """A model that is asked what it says of texts or pictures."""

    path: Path
    contract: Contract
    run: Callable[[Sequence[EncodedItem]], Outputs]  # items of one length, none of them padded

    def predict(self, items: Sequence[EncodedItem]) -> list[ItemPrediction | None]:
        """Return what it says of items of one length; None stands for one that is not finite."""
        return split(self.run(items), items)


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
    if (path / MANIFEST_NAME).is_file():
        package = load_package(path)  # run on the CPU as the engine runs it
        cpu = EngineConfig(device="cpu")
        device_of(package.manifest, path, cpu)  # PackageError, if a CPU has no kernels
        of_both = {field.name: getattr(package.manifest, field.name) for field in fields(Contract)}
        session = create_session(package.file("model.onnx"))
        return Predictor(path, Contract(**of_both), partial(predict, session))
    checkpoint = load_checkpoint(path)

    def run(items: Sequence[EncodedItem]) -> Outputs:
        given = {name: torch.from_numpy(values) for name, values in stack(items).items()}
        if PIXEL_VALUES in given:
            output = run_eager(checkpoint.model, (given[PIXEL_VALUES],))
        elif TOKEN_TYPE_IDS in given:
            output = run_eager(checkpoint.model, (given[INPUT_IDS], None, given[TOKEN_TYPE_IDS]))
        else:
            output = run_eager(checkpoint.model, (given[INPUT_IDS],))
        found = output._asdict().items()
        return {name: part.numpy() for name, part in found if part is not None}

    return Predictor(path, contract_of(checkpoint.config.model), run)
