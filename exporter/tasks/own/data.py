"""What a person gives a task to learn from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from engine.errors import ConfigError
from engine.package.files import hash_file
from engine.requests.generation_defaults import GenerationDefaults
from exporter.checkpoint import Checkpoint, unique_weights
from exporter.models.config import Family, TransformerConfig
from exporter.tasks.own.parts import Parts, divide
from exporter.tasks.own.size import SIZES, Size, SizeName
from exporter.training.task import Recipe

Row = TypeVar("Row")
_FINE_TUNING = 0.1  # of the learning rate from fresh weights


@dataclass(frozen=True)
class OwnData:
    """A file or a directory of examples, and how large a model is to learn from them."""

    path: Path
    validation: Path | None = None  # examples to judge by; None: some of `path`
    size: SizeName = "tiny"
    start: Checkpoint | None = None  # the model to go on from; None: one with fresh weights

    @property
    def shape(self) -> Size:
        """The size of a model with fresh weights."""
        return SIZES[self.size]

    @property
    def initial_weights(self) -> Mapping[str, Tensor]:
        """The weights to start from; none for fresh ones."""
        return {} if self.start is None else unique_weights(self.start.model)

    @property
    def generation(self) -> GenerationDefaults:
        """What the model to start from gives to requests that leave options away."""
        return GenerationDefaults() if self.start is None else self.start.config.generation

    @property
    def fingerprint(self) -> str:
        """A digest of all that was given, for a run that is resumed to have the same."""
        digest = hashlib.sha256()
        for path in _files(self.path), _files(self.validation):
            for file in path:
                digest.update(file.name.encode() + b"\0" + bytes.fromhex(hash_file(file).sha256))
        for name, weight in self.initial_weights.items():
            digest.update(name.encode() + b"\0" + weight.numpy().tobytes())
        return digest.hexdigest()

    def divided(
        self, read: Callable[[Path], Sequence[Row]], key: Callable[[Row], str]
    ) -> Parts[Row]:
        """Return what is learned from and judged by, as `read` finds it; see `divide`."""
        given = None if self.validation is None else read(self.validation)
        return divide(read(self.path), key, given)

    def started(self, family: Family) -> Checkpoint | None:
        """Return the checkpoint to go on from; ConfigError if it is of another family."""
        if self.start is not None and self.start.config.model.family != family:
            raise ConfigError(
                f"{self.start.path} holds a model of the family {self.start.config.model.family}, "
                f"this task trains {family}; start from a checkpoint of that family"
            )
        return self.start

    def recipe(self, config: TransformerConfig) -> Recipe:
        """Return how a model learns from the data."""
        shape, is_fresh = self.shape, self.start is None
        warmup_steps = max(1, shape.steps // 15)
        return Recipe(
            steps=shape.steps,
            batch_tokens=64 if config.family == "vit" else shape.batch_tokens,
            peak_learning_rate=shape.peak_learning_rate * (1 if is_fresh else _FINE_TUNING),
            warmup_steps=warmup_steps,
            label_smoothing=0.1,
            weight_decay=0.01,
            average_decay=0.998,
            validate_every=max(1, shape.steps // 10),
        )


def _files(path: Path | None) -> list[Path]:
    """Return a file, or all files of a directory."""
    if path is None:
        return []
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
