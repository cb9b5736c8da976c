"""The two models that are compared: a package as the engine runs it, or an eager model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import nn

from engine.errors import ConfigError
from engine.package.manifest import GenerationContract
from engine.package.package import MANIFEST_NAME, load_package
from engine.requests.generation_defaults import GenerationDefaults
from exporter.certificate.comparison import Floats, exported_graphs
from exporter.certificate.driver import Asked, generate
from exporter.certificate.eager import eager_logits
from exporter.certificate.execution import load_for_cpu
from exporter.certificate.generation_cases import Case
from exporter.checkpoint import load_checkpoint
from exporter.graphs.contracts import generation_contract
from exporter.samples import Tokens
from exporter.training.state import STATE_NAME

BATCH_SIZE = 8  # cases beside each other


class Side(Protocol):
    """A model that is asked what it gives for cases."""

    path: Path
    contract: GenerationContract
    defaults: GenerationDefaults

    def follow(self, cases: Sequence[Case], tokens: Sequence[Tokens]) -> list[Floats]:
        """Return the logits [num_logits, vocab_size] of each case, followed by given tokens."""

    def write(self, cases: Sequence[Case]) -> list[Floats]:
        """Return the logits of each case, followed by the tokens that are likeliest by them."""


def open_side(path: Path) -> Side:
    """Return the model in a directory, a package or a checkpoint.

    Raises ConfigError for one that does not generate, PackageError and CheckpointError.
    """
    return Exported(path) if (path / MANIFEST_NAME).is_file() else Eager(path)


class Exported:
    """A package, run on the CPU as the engine runs it."""

    def __init__(self, path: Path) -> None:
        package = load_package(path)
        self.path = path
        self.contract = _generating(package.manifest.generation, path)
        self.defaults = package.manifest.defaults
        with exported_graphs():
            self._runner = load_for_cpu(self.contract, path, 0, BATCH_SIZE)

    def follow(self, cases: Sequence[Case], tokens: Sequence[Tokens]) -> list[Floats]:
        """See Side."""
        return [seen.all_logits for seen in generate(self._runner, cases, Asked(), tokens)]

    def write(self, cases: Sequence[Case]) -> list[Floats]:
        """See Side."""
        return [seen.all_logits for seen in generate(self._runner, cases, Asked())]


class Eager:
    """A checkpoint, run by PyTorch without a cache."""

    def __init__(self, path: Path) -> None:
        checkpoint = load_checkpoint(path)
        self.path = path
        self.contract = _generating(generation_contract(checkpoint.config.model), path)
        self.defaults = checkpoint.config.generation
        self._model: nn.Module = checkpoint.model

    def follow(self, cases: Sequence[Case], tokens: Sequence[Tokens]) -> list[Floats]:
        """See Side."""
        return eager_logits(self._model, cases, tokens)

    def write(self, cases: Sequence[Case]) -> list[Floats]:
        """See Side."""
        chosen: list[Tokens] = [() for _ in cases]
        for number in range(max(case.num_tokens for case in cases)):
            writing = [i for i, case in enumerate(cases) if number < case.num_tokens]
            so_far = [replace(cases[i], num_tokens=number + 1) for i in writing]
            found = eager_logits(self._model, so_far, [(*chosen[i], 0) for i in writing])
            for i, logits in zip(writing, found, strict=True):
                chosen[i] = (*chosen[i], *cases[i].likeliest(logits[-1:]))
        return self.follow(cases, chosen)


def _generating(contract: GenerationContract | None, path: Path) -> GenerationContract:
    if contract is None:
        raise ConfigError(f"{path} holds a model that does not generate; give two that do")
    return contract


def size_of(path: Path) -> int:
    """Return how many bytes the files of a model have, without the state of a training run."""
    files = (file for file in path.iterdir() if file.is_file() and file.name != STATE_NAME)
    return sum(file.stat().st_size for file in files)
