"""What a person gives a task to learn from."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from engine.errors import ConfigError
from engine.package.files import hash_file
from engine.requests.generation_defaults import GenerationDefaults
from exporter.checkpoint import Checkpoint, TextFiles, unique_weights
from exporter.models.config import Family, TransformerConfig
from exporter.tasks.own.labels import HEADS
from exporter.tasks.own.parts import Parts, divide
from exporter.tasks.own.size import SIZES, Size, SizeName
from exporter.training.data import ChunkSource, Example
from exporter.training.task import Recipe, Task

Row = TypeVar("Row")
Vary = Callable[[np.random.Generator, Example], Example]
# Examples that are drawn at a time, in another order each time. Of many, more are alike in length,
# and less of a batch is padding; of pictures each is a copy in memory.
_CHUNK_EXAMPLES, _CHUNK_IMAGES = 16_384, 1024
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

    def task(
        self,
        name: str,
        seed: int,
        config: TransformerConfig,
        tokenizer: Tokenizer | None,
        examples: Parts[Example],
        *,
        vary: Vary = lambda _, example: example,
        **described: Any,
    ) -> Task:
        """Return a task that learns from examples, each time changed by `vary`.

        `described` are the fields of a Task that are told apart: selection, judge, samples, ...
        """
        start, weights = self.start, {}
        generation, text = GenerationDefaults(), TextFiles()
        if start is not None:
            weights = _kept_weights(start, config)
            generation, text = start.config.generation, start.text
        return Task(
            name=name,
            config=config,
            tokenizer=tokenizer,
            recipe=self.recipe(config),
            chunks=_chunks(f"{name}/{seed}", examples.training, vary, _chunk_size(config)),
            validation=examples.validation,
            held_out=examples.held_out,
            data_fingerprint=self._fingerprint(weights, text),
            initial_weights=weights,
            generation=generation,
            text=text,
            **described,
        )

    def _fingerprint(self, weights: Mapping[str, Tensor], text: TextFiles) -> str:
        """Return a digest of all that was given, for a run that is resumed to have the same."""
        digest = hashlib.sha256()
        for path in _files(self.path), _files(self.validation):
            for file in path:
                digest.update(file.name.encode() + b"\0" + bytes.fromhex(hash_file(file).sha256))
        for name, weight in weights.items():
            digest.update(name.encode() + b"\0" + weight.numpy().tobytes())
        for name, content in text.content().items():
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()

    def divided(
        self, read: Callable[[Path], Sequence[Row]], key: Callable[[Row], str]
    ) -> Parts[Row]:
        """Return what is learned from and judged by, as `read` finds it; see `divide`."""
        given = None if self.validation is None else read(self.validation)
        return divide(read(self.path), key, given)

    def started(self, *families: Family) -> Checkpoint | None:
        """Return the checkpoint to go on from; ConfigError if it is of none of the families."""
        start = self.start
        if start is not None and start.config.model.family not in families:
            raise ConfigError(
                f"{start.path} holds a model of the family {start.config.model.family}, this task "
                f"starts from {' or '.join(families)}; give a checkpoint of such a family"
            )
        return start

    def recipe(self, config: TransformerConfig) -> Recipe:
        """Return how a model learns from the data."""
        shape = self.shape
        writes = config.family == "encoder-decoder"
        rate = shape.writing_rate if writes else shape.peak_learning_rate
        warmup_steps = max(1, shape.steps // 15)
        return Recipe(
            steps=shape.steps,
            batch_tokens=64 if config.family == "vit" else shape.batch_tokens,
            peak_learning_rate=rate * (1 if self.start is None else _FINE_TUNING),
            warmup_steps=warmup_steps,
            label_smoothing=0.1,
            weight_decay=0.01,
            average_decay=0.998,
            validate_every=max(1, shape.steps // 10),
        )


def _kept_weights(start: Checkpoint, config: TransformerConfig) -> dict[str, Tensor]:
    """Return the weights to start from: a head that tells other labels is none of them."""
    weights, before = unique_weights(start.model), start.config.model
    if (config.family, config.labels) == (before.family, before.labels):
        return weights
    return {name: one for name, one in weights.items() if not name.startswith(HEADS)}


def _chunk_size(config: TransformerConfig) -> int:
    return _CHUNK_IMAGES if config.family == "vit" else _CHUNK_EXAMPLES


def _chunks(name: str, examples: Sequence[Example], vary: Vary, size: int) -> ChunkSource:
    """Return what draws examples for a number of a chunk, for the same one always the same."""

    def chunk(number: int) -> list[Example]:
        seed = zlib.crc32(f"{name}/{number}".encode())
        rng = np.random.default_rng(seed)
        drawn = rng.permutation(len(examples))[:size]
        return [vary(rng, examples[i]) for i in drawn]

    return chunk


def _files(path: Path | None) -> list[Path]:
    """Return a file, or all files of a directory."""
    if path is None:
        return []
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
