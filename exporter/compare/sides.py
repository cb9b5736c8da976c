"""The two forms of a model that are compared, those that generate: a package, or PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.errors import ConfigError
from engine.package.manifest import GenerationContract
from engine.package.package import MANIFEST_NAME, load_package
from engine.requests.generation_defaults import GenerationDefaults
from exporter.checkpoint import TARGET_TOKENIZER_NAME, TOKENIZER_NAME, load_checkpoint
from exporter.graphs.contracts import generation_contract
from exporter.prover.driver import Asked, exported_graphs, generate
from exporter.prover.eager import Floats, alike, logits_of, num_parameters
from exporter.prover.execution import load_for_cpu
from exporter.prover.generation_cases import Case
from exporter.samples import Tokens
from exporter.training.state import STATE_NAME

BATCH_SIZE = 8  # cases beside each other
_QUANTILES = (0.5, 0.9, 0.99, 1.0)

Progress = Callable[[int, int], None]  # lines that are done, of how many


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
    contract: GenerationContract
    defaults: GenerationDefaults
    writer: Writer


def open_side(path: Path) -> Side:
    """Return the model in a directory, a package or a checkpoint.

    Raises ConfigError for one that does not generate, PackageError and CheckpointError.
    """
    if (path / MANIFEST_NAME).is_file():
        manifest = load_package(path).manifest
        contract = _generating(manifest.generation, path)
        return Side(path, contract, manifest.defaults, GraphWriter(contract, path))
    checkpoint = load_checkpoint(path)
    contract = _generating(generation_contract(checkpoint.config.model), path)
    return Side(path, contract, checkpoint.config.generation, EagerWriter(checkpoint.model))


def _generating(contract: GenerationContract | None, path: Path) -> GenerationContract:
    if contract is None:
        raise ConfigError(f"{path} holds a model that does not generate; give two that do")
    return contract


def size_of(path: Path) -> int:
    """Return how many bytes the files of a model have, without the state of a training run."""
    files = (file for file in path.iterdir() if file.is_file() and file.name != STATE_NAME)
    return sum(file.stat().st_size for file in files)


def quantiles(values: NDArray[np.float64]) -> dict[str, float]:
    """Return the median, and what is above it, by name."""
    return {f"{q:.0%}": float(np.quantile(values, q)) for q in _QUANTILES}


def other_files(one: Path, other: Path) -> list[str]:
    """Return what of the files that make tokens of texts is not the same."""
    contents = [
        [
            file.read_bytes() if (file := path / name).is_file() else b""
            for name in (TOKENIZER_NAME, TARGET_TOKENIZER_NAME)
        ]
        for path in (one, other)
    ]
    return ["their tokenizers"] if contents[0] != contents[1] else []
