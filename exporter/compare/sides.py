"""The two forms of a model that are compared: a package, or PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import nn

from engine.config import EngineConfig
from engine.factory import device_of
from engine.one_pass.item_encoder import EncodedItem
from engine.package.manifest import Contract, GenerationContract
from engine.package.package import MANIFEST_NAME, load_package, read_manifest
from engine.requests.generation_defaults import GenerationDefaults
from engine.session import create_session
from exporter.checkpoint import load_checkpoint, read_config
from exporter.graphs.contracts import contract_of
from exporter.prover.driver import Asked, exported_graphs, generate, predict
from exporter.prover.eager import Floats, alike, logits_of, num_parameters
from exporter.prover.execution import load_for_cpu
from exporter.prover.generation_cases import Case
from exporter.prover.item_cases import run_eager
from exporter.samples import Tokens
from exporter.training.state import STATE_NAME

BATCH_SIZE = 8  # cases beside each other

Item = TypeVar("Item")
Outputs = Mapping[str, Floats]
Predict = Callable[[Sequence[EncodedItem]], Outputs]


class Writer(Protocol):
    """A model that is asked what it gives for at most BATCH_SIZE cases."""

    def follow(self, cases: Sequence[Case], tokens: Sequence[Tokens]) -> list[Floats]:
        """Return the logits [num_logits, vocab_size] of each case, followed by given tokens."""

    def write(self, cases: Sequence[Case]) -> list[Floats]:
        """Return the logits of each case, followed by the tokens that are likeliest by them."""


class GraphWriter:
    """The graphs of a package, run on the CPU as the engine runs them."""

    def __init__(self, contract: GenerationContract, directory: Path) -> None:
        with exported_graphs():
            self._runner = load_for_cpu(contract, directory, 0, BATCH_SIZE)

    def follow(self, cases: Sequence[Case], tokens: Sequence[Tokens]) -> list[Floats]:
        """See Writer."""
        return [seen.all_logits for seen in generate(self._runner, cases, Asked(), tokens)]

    def write(self, cases: Sequence[Case]) -> list[Floats]:
        """See Writer."""
        return [seen.all_logits for seen in generate(self._runner, cases, Asked())]


class EagerWriter:
    """A model that PyTorch computes without a cache."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def follow(self, cases: Sequence[Case], tokens: Sequence[Tokens]) -> list[Floats]:
        """See Writer."""
        found: dict[int, Floats] = {}
        for members in alike(cases, num_parameters(self._model)):
            forward = logits_of([cases[i] for i in members], [tokens[i] for i in members])
            with torch.inference_mode():
                found |= zip(members, forward(self._model), strict=True)
        return [found[i] for i in range(len(cases))]

    def write(self, cases: Sequence[Case]) -> list[Floats]:
        """See Writer."""
        chosen: list[Tokens] = [() for _ in cases]
        for number in range(max(case.num_tokens for case in cases)):
            writing = [i for i, case in enumerate(cases) if number < case.num_tokens]
            so_far = [replace(cases[i], num_tokens=number + 1) for i in writing]
            found = self.follow(so_far, [(*chosen[i], 0) for i in writing])
            for i, logits in zip(writing, found, strict=True):
                chosen[i] = (*chosen[i], *cases[i].likeliest(logits[-1:]))
        return self.follow(cases, chosen)


@dataclass(frozen=True)
class Side:
    """A model in a directory."""

    path: Path
    contract: Contract
    defaults: GenerationDefaults
    # The model's task says which of the two there is.
    writer: Writer | None
    predict: Predict | None  # items of one length, none of them padded


def generates(path: Path) -> bool:
    """Say whether the model in a directory, a package or a checkpoint, generates.

    Raises PackageError or CheckpointError for a directory that is neither.
    """
    if (path / MANIFEST_NAME).is_file():
        return read_manifest(path).generation is not None
    return contract_of(read_config(path).model).generation is not None


def open_side(path: Path) -> Side:
    """Return the model in a directory, a package or a checkpoint.

    Raises PackageError and CheckpointError.
    """
    if (path / MANIFEST_NAME).is_file():
        package = load_package(path)  # run on the CPU as the engine runs it
        manifest = package.manifest
        contract = manifest.contract
        if contract.generation:
            writer = GraphWriter(contract.generation, path)
            return Side(path, contract, manifest.defaults, writer, None)
        device_of(manifest, path, EngineConfig(device="cpu"))  # PackageError: it has no kernels
        session = create_session(package.file("model.onnx"))
        return Side(path, contract, manifest.defaults, None, partial(predict, session))
    checkpoint = load_checkpoint(path)
    contract, model = contract_of(checkpoint.config.model), checkpoint.model
    if contract.generation:
        return Side(path, contract, checkpoint.config.generation, EagerWriter(model), None)
    return Side(path, contract, checkpoint.config.generation, None, partial(_predict_eager, model))


def batches(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Return the items, so many together as run beside each other."""
    return [items[first : first + BATCH_SIZE] for first in range(0, len(items), BATCH_SIZE)]


def size_of(path: Path) -> int:
    """Return how many bytes the files of a model have, without the state of a training run."""
    files = (file for file in path.iterdir() if file.is_file() and file.name != STATE_NAME)
    return sum(file.stat().st_size for file in files)


def _predict_eager(model: nn.Module, items: Sequence[EncodedItem]) -> Outputs:
    found = run_eager(model, items)._asdict().items()
    return {name: part.numpy() for name, part in found if part is not None}
