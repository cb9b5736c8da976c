"""Examples into batches: packed by token count, padded, in an order that can be resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from engine.package.manifest import Architecture
from exporter.models.config import TransformerConfig

_STRIP = 3  # target lengths that `pack` takes as alike
IGNORED = -100  # the label of a position that does not count; the default of cross_entropy


@dataclass(frozen=True)
class Example:
    """One training example of any architecture.

    | architecture    | source                                | target                           |
    |-----------------|---------------------------------------|----------------------------------|
    | encoder-decoder | token ids [S]                         | token ids [T], with the last EOS |
    | decoder         | token ids [T]                         | the ids that follow them [T]     |
    | encoder         | token ids [S]                         | one label [1], or those of each  |
    |                 |                                       | token [S], IGNORED allowed       |
    | vision-encoder  | float32 pixel values [ch, size, size] | one label [1]                    |
    """

    source: NDArray[np.int64] | NDArray[np.float32]
    target: NDArray[np.int64]
    text: str | None = None  # the expected output, if that is judged as a text


@dataclass(frozen=True)
class Batch:
    """Padded tensors of several examples."""

    source: torch.Tensor  # int64 [B, S], or float32 [B, channels, size, size]
    source_mask: torch.Tensor | None  # bool [B, S], True at real tokens; None: nothing to mask
    decoder_input: torch.Tensor | None  # int64 [B, T]; encoder-decoder only
    labels: torch.Tensor  # int64 [B, T], IGNORED at padding; [B] for one label an example
    num_tokens: int  # sources and targets, without padding


@dataclass(frozen=True)
class Position:
    """How far a run has come in its stream of examples."""

    chunk: int = 0
    batch: int = 0  # the next of that chunk


ChunkSource = Callable[[int], Sequence[Example]]  # number -> always the same examples


class BatchStream:
    """An endless stream of batches that can start at any position.

    A chunk is a function of its number alone, so that a position is two integers and an
    interrupted run goes on with exactly the batches that it would have had.
    """

    def __init__(
        self,
        chunks: ChunkSource,
        config: TransformerConfig,
        *,
        batch_tokens: int,
        seed: int,
        position: Position | None = None,
    ) -> None:
        self._chunks = chunks
        self._config = config
        self._batch_tokens = batch_tokens
        self._seed = seed
        self.position = position or Position()
        self._planned = self._plan(self.position.chunk)

    def next(self) -> Batch:
        """Return the next batch and move on."""
        chunk, batch = self.position.chunk, self.position.batch
        if batch == len(self._planned):
            chunk, batch = chunk + 1, 0
            self._planned = self._plan(chunk)
        self.position = Position(chunk, batch + 1)
        return collate(self._planned[batch], self._config)

    def _plan(self, number: int) -> list[list[Example]]:
        rng = random.Random(f"batches/{self._seed}/{number}")
        examples = list(self._chunks(number))
        rng.shuffle(examples)
        batches = pack(examples, self._config.architecture, self._batch_tokens)
        rng.shuffle(batches)
        return batches


def pack(
    examples: Sequence[Example], architecture: Architecture, batch_tokens: int
) -> list[list[Example]]:
    """Group examples of like length; no batch, padding included, is above `batch_tokens`.

    An example that alone is longer becomes a batch of its own. The order of examples of equal
    length is kept. The number of images in a batch is limited.
    """
    batches: list[list[Example]] = []
    current: list[Example] = []
    longest_source = longest_target = 0
    by_length = [(_lengths(example, architecture), example) for example in examples]
    by_length.sort(key=lambda pair: _place(*pair[0]))
    for (source, target), example in by_length:
        longest_source, longest_target = max(longest_source, source), max(longest_target, target)
        if current and (len(current) + 1) * (longest_source + longest_target) > batch_tokens:
            batches.append(current)
            current, longest_source, longest_target = [], source, target
        current.append(example)
    if current:
        batches.append(current)
    return batches


def _place(source: int, target: int) -> tuple[int, int, int]:
    """Return where an example stands in a walk on which neighbours have like lengths.

    It goes through strips of target lengths, along the source lengths of one upwards and of the
    next downwards, so that no step is long in either.
    """
    strip = target // _STRIP
    return strip, source if strip % 2 == 0 else -source, target


def collate(examples: Sequence[Example], config: TransformerConfig) -> Batch:
    """Pad examples to one batch."""
    labels, num_labels = _pad([e.target for e in examples], IGNORED)
    if not config.num_decoder_layers and not config.head.each_token:  # one label an example
        labels, num_labels = labels[:, 0], 0
    if config.architecture == "vision-encoder":
        pixels = torch.from_numpy(np.stack([e.source for e in examples]))
        assert config.image is not None  # checked by the configuration
        num_patches = (config.image.size // config.image.patch_size) ** 2
        return Batch(pixels, None, None, labels, num_tokens=len(examples) * num_patches)
    num_sources = sum(len(e.source) for e in examples)
    source, mask = padded_rows([e.source for e in examples], config.pad_token_id)
    if config.architecture == "decoder":  # causal: what follows on the right is never seen
        return Batch(source, None, None, labels, num_tokens=num_sources)
    if config.architecture != "encoder-decoder":
        return Batch(source, mask, None, labels, num_tokens=num_sources)
    decoder_input = _shift_right(labels, config)
    return Batch(source, mask, decoder_input, labels, num_tokens=num_sources + num_labels)


def padded_rows(
    rows: Sequence[NDArray[np.generic]], filler: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows of ids, int64 [B, S], and bool [B, S], True at those that are none of `filler`.

    None in the place of the mask: all rows have the same length.
    """
    lengths = [len(row) for row in rows]
    longest, mask = max(lengths), None
    if min(lengths) < longest:  # attention without a mask is faster
        mask = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]  # [B, S]
    return _pad(rows, filler)[0], mask


def _lengths(example: Example, architecture: Architecture) -> tuple[int, int]:
    """Return how many positions an example needs in the encoder and in the decoder."""
    if architecture == "vision-encoder":
        return 1, 0
    if architecture == "encoder-decoder":
        return len(example.source), len(example.target)
    return len(example.source), 0


def _pad(rows: Sequence[NDArray[np.generic]], filler: int) -> tuple[torch.Tensor, int]:
    given = [torch.from_numpy(row.astype(np.int64)) for row in rows]
    return pad_sequence(given, batch_first=True, padding_value=filler), sum(map(len, rows))


def _shift_right(labels: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Return what the decoder reads to predict `labels`: the start token, then all but the last."""
    assert config.bos_token_id is not None  # checked by the configuration
    shifted = torch.empty_like(labels)
    shifted[:, 0] = config.bos_token_id
    shifted[:, 1:] = labels[:, :-1]
    return shifted.masked_fill(shifted == IGNORED, config.pad_token_id)
