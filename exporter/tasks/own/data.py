"""The data that a person gives a task to learn from."""

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

from engine.package.files import hash_file
from engine.package.manifest import Architecture
from engine.requests.generation_defaults import GenerationDefaults
from exporter.checkpoint import Checkpoint, TextFiles
from exporter.models.config import TransformerConfig
from exporter.tasks.own.parts import Parts, divide
from exporter.tasks.own.size import SIZES, Size, SizeName
from exporter.tasks.start import FINE_TUNING, digest_of, kept_weights, of_architecture
from exporter.training.data import ChunkSource, Example
from exporter.training.task import Recipe, Task

Row = TypeVar("Row")
Vary = Callable[[np.random.Generator, Example], Example]
# Examples that are drawn at a time, in another order each time. Large chunks have more examples of
# like length, so that less of a batch is padding; each picture is a copy in memory.
_CHUNK_EXAMPLES, _CHUNK_IMAGES = 16_384, 1024


@dataclass(frozen=True)
class OwnData:
    """A file or a directory of examples, and how large a model is to learn from them."""

    path: Path
    validation: Path | None = None  # examples to judge by; None: some of `path`
    size: SizeName | Size = "tiny"
    start: Checkpoint | None = None  # the model to go on from; None: one with fresh weights

    @property
    def shape(self) -> Size:
        """The size of a model with fresh weights."""
        return self.size if isinstance(self.size, Size) else SIZES[self.size]

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
            weights = kept_weights(start, config)
            generation, text = start.config.generation, start.text
        chunk_size = _CHUNK_IMAGES if config.architecture == "vision-encoder" else _CHUNK_EXAMPLES
        return Task(
            name=name,
            config=config,
            tokenizer=tokenizer,
            recipe=self.recipe(config),
            chunks=_chunks(f"{name}/{seed}", examples.training, vary, chunk_size),
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
        digest.update(digest_of(weights).encode())
        for name, content in text.content().items():
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()

    def divided(
        self, read: Callable[[Path], Sequence[Row]], key: Callable[[Row], str]
    ) -> Parts[Row]:
        """Return what is learned from and judged by, as `read` finds it; see `divide`."""
        given = None if self.validation is None else read(self.validation)
        return divide(read(self.path), key, given)

    def started(self, architecture: Architecture) -> Checkpoint | None:
        """Return the checkpoint to go on from; ConfigError if it is of another architecture."""
        return of_architecture(self.start, architecture)

    def recipe(self, config: TransformerConfig) -> Recipe:
        """Return how a model learns from the data."""
        shape = self.shape
        writes = config.architecture == "encoder-decoder"
        rate = shape.writing_rate if writes else shape.peak_learning_rate
        warmup_steps = max(1, shape.steps // 15)
        return Recipe(
            steps=shape.steps,
            batch_tokens=64 if config.architecture == "vision-encoder" else shape.batch_tokens,
            peak_learning_rate=rate * (1 if self.start is None else FINE_TUNING),
            warmup_steps=warmup_steps,
            label_smoothing=0.1,
            weight_decay=0.01,
            average_decay=0.998,
            validate_every=max(1, shape.steps // 10),
        )


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
