"""Compares a one-pass package with its eager model: texts of every length, or images.

Each item runs alone, in batches of its own length, and padded among longer ones. The other side is
the eager model without a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.package import EncodingContract, ImageContract
from engine.session import create_session
from exporter.cases import (
    BATCH_SIZES,
    MAX_PER_LENGTH,
    MOST_ROWS,
    SEED,
    Covered,
    Progress,
    Tokens,
    largest_batch,
    random_tokens,
    spread_lengths,
)
from exporter.comparison import Comparison, Floats, exported_graphs

NUM_IMAGES = 40


@dataclass(frozen=True, eq=False)
class Output:
    """What one of the two sides gives for a batch."""

    logits: Floats  # [B, C], or [B, S, C] of a labeller
    embedding: Floats  # [B, D]

    def rows(self, members: Sequence[int]) -> Output:
        """Return some of the rows."""
        return Output(self.logits[members], self.embedding[members])


def certify_encoding(
    model: nn.Module,
    contract: EncodingContract,
    directory: Path,
    samples: Sequence[Tokens],
    comparison: Comparison,
    progress: Progress,
) -> tuple[int, Covered]:
    """Compare all cases; return their number and what they covered.

    `samples` are texts to try besides random ones. Raises CertificateError at the first
    difference that `comparison` refuses.
    """
    rng = np.random.default_rng(SEED)
    groups = [[sample] for sample in samples] + random_groups(rng, contract)
    certifier = _TextCertifier(model, directory, comparison, contract.vocab_size)
    num_texts, done = sum(map(len, groups)), 0
    total = (1 + len(BATCH_SIZES)) * num_texts

    texts, expected = [], []
    for group in groups:
        output = certifier.check_equal_lengths(group)
        for i, text in enumerate(group):
            texts.append(text)
            expected.append(Output(output.logits[i], output.embedding[i]))
        done += len(group)
        progress(done, total)
    order = rng.permutation(num_texts).tolist()
    for members in _parts(order):
        certifier.check_padded([texts[i] for i in members], [expected[i] for i in members])
        done += len(members)
        progress(done, total)

    covered: Covered = {
        "lengths": sorted(set(map(len, texts))),
        "padded_rows": num_texts,
        "batch_sizes": [1, *BATCH_SIZES],
        "most_rows": MOST_ROWS,
        "undecided_labels": comparison.tokens_undecided,
    }
    return num_texts, covered


def certify_images(
    model: nn.Module,
    contract: ImageContract,
    directory: Path,
    comparison: Comparison,
    progress: Progress,
) -> tuple[int, Covered]:
    """Do as `certify_encoding` with images of noise, of different brightness and contrast."""
    pixels = draw_images(contract)
    certifier = _Certifier(model, directory, comparison)
    eager_input = torch.from_numpy(pixels).to(next(model.parameters()).dtype)
    certifier.check_rows({"pixel_values": pixels}, eager_input, "image", largest_batch(1))
    progress(NUM_IMAGES, NUM_IMAGES)
    covered: Covered = {
        "images": NUM_IMAGES,
        "batch_sizes": [1, *BATCH_SIZES],
        "most_rows": MOST_ROWS,
        "undecided_labels": comparison.tokens_undecided,
    }
    return NUM_IMAGES, covered


def draw_images(contract: ImageContract) -> Floats:
    """Return images of noise, of different brightness and contrast, as a model takes them."""
    rng = np.random.default_rng(SEED)
    shape = (NUM_IMAGES, contract.channels, contract.size, contract.size)
    spread = rng.uniform(0.1, 2.0, (NUM_IMAGES, 1, 1, 1))
    noise = rng.standard_normal(shape) * spread + rng.uniform(-1, 1, spread.shape)
    return noise.astype(np.float32)


class _Certifier:
    """The two sides, and what was found so far."""

    def __init__(self, model: nn.Module, directory: Path, comparison: Comparison) -> None:
        self.comparison = comparison
        self._model = model
        with exported_graphs():
            self._session = create_session(directory / "model.onnx")

    def check_rows(
        self,
        inputs: dict[str, NDArray[np.generic]],
        eager_input: torch.Tensor,
        what: str,
        most: int,
    ) -> Output:
        """Compare rows of one shape, alone and in batches; return the eager model's output.

        In a batch of `most` rows they come again and again.
        """
        with torch.inference_mode():
            output = self._model(eager_input)
        expected = Output(output.logits.numpy(), output.embedding.numpy())
        rows = list(range(len(eager_input)))
        solo = [self._run(inputs, [i]) for i in rows]
        alone = Output(
            np.concatenate([output.logits for output in solo]),
            np.concatenate([output.embedding for output in solo]),
        )
        self._compare(alone, expected, lambda i: f"{what} {i}, alone")
        for members in (*_parts(rows), [i % len(rows) for i in range(most)]):
            self._check_batch(
                self._run(inputs, members),
                alone.rows(members),
                expected.rows(members),
                _place_in_batch(what, members),
            )
        return expected

    def _check_batch(
        self, found: Output, alone: Output, expected: Output, place: Callable[[int], str]
    ) -> None:
        """Hold a batch against its rows alone, and where they may differ, against eager ones."""
        equal = self.comparison.bits(found.logits, alone.logits, place)
        equal &= self.comparison.bits(found.embedding, alone.embedding, place)
        if not equal:
            self._compare(found, expected, place)

    def _run(self, inputs: dict[str, NDArray[np.generic]], members: Sequence[int]) -> Output:
        with exported_graphs():
            outputs = self._session.run({name: array[members] for name, array in inputs.items()})
        return Output(outputs["logits"], outputs["embedding"])

    def _compare(self, ours: Output, theirs: Output, place: Callable[[int], str]) -> None:
        per_row = ours.logits.size // (ours.logits.shape[-1] * len(ours.logits))
        self.comparison.logits(
            ours.logits.reshape(-1, ours.logits.shape[-1]),
            theirs.logits.reshape(-1, ours.logits.shape[-1]),
            lambda i: place(i // per_row) + (f", token {i % per_row}" if per_row > 1 else ""),
        )
        self.comparison.values(ours.embedding, theirs.embedding, place)


class _TextCertifier(_Certifier):
    """Texts come with lengths, and may be padded."""

    def __init__(
        self, model: nn.Module, directory: Path, comparison: Comparison, vocab_size: int
    ) -> None:
        super().__init__(model, directory, comparison)
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(SEED)

    def check_equal_lengths(self, texts: Sequence[Tokens]) -> Output:
        """Compare texts of one length; return the eager model's output."""
        ids = np.array(texts, np.int64)  # [B, S]
        inputs: dict[str, NDArray[np.generic]] = {
            "input_ids": ids,
            "lengths": np.full(len(ids), ids.shape[1], np.int64),
        }
        what = f"text of {ids.shape[1]} tokens, number"
        return self.check_rows(inputs, torch.from_numpy(ids), what, largest_batch(ids.shape[1]))

    def check_padded(self, texts: Sequence[Tokens], expected: Sequence[Output]) -> None:
        """Compare texts of different lengths in one batch; what pads them is random tokens."""
        lengths = np.array([len(text) for text in texts], np.int64)
        ids = self._rng.integers(0, self._vocab_size, (len(texts), lengths.max()))
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
        found = self._run({"input_ids": ids, "lengths": lengths}, range(len(texts)))
        for row, theirs in enumerate(expected):
            per_token = theirs.logits.ndim > 1
            logits = found.logits[row, : lengths[row]] if per_token else found.logits[row]
            self._compare(
                Output(logits[None], found.embedding[row : row + 1]),
                Output(theirs.logits[None], theirs.embedding[None]),
                _place_padded(int(lengths[row]), ids.shape[1]),
            )


def random_groups(rng: np.random.Generator, contract: EncodingContract) -> list[list[Tokens]]:
    """Return texts of random tokens, those of one length together."""
    return [
        [random_tokens(rng, contract.vocab_size, length) for _ in range(MAX_PER_LENGTH)]
        for length in spread_lengths(contract.max_len)
    ]


def _parts(members: Sequence[int]) -> list[Sequence[int]]:
    """Return batches of every size in turn, until each size has had every member."""
    return [
        members[first : first + size]
        for size in BATCH_SIZES
        for first in range(0, len(members), size)
    ]


def _place_in_batch(what: str, members: Sequence[int]) -> Callable[[int], str]:
    return lambda i: f"{what} {members[i]}, in a batch of {len(members)}"


def _place_padded(length: int, padded_length: int) -> Callable[[int], str]:
    return lambda _: f"text of {length} tokens, padded to {padded_length}"
