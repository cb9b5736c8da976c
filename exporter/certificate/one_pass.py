"""Compares a one-pass package with its eager model: texts of every length, or images.

Each item runs alone, in batches of its own length, and padded among longer ones. The other side is
the eager model without a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.package.graph_io import EMBEDDING, INPUT_IDS, LENGTHS, LOGITS, PIXEL_VALUES
from engine.package.manifest import EncodingContract, ImageContract
from engine.session import Session
from exporter.certificate.cases import BATCH_SIZES, MOST_ROWS, Covered, Progress, largest_batch
from exporter.certificate.comparison import Comparison, Floats, exported_graphs
from exporter.certificate.half_comparison import Half
from exporter.certificate.one_pass_cases import NUM_IMAGES, draw_images, random_groups
from exporter.samples import SEED, Tokens


@dataclass(frozen=True, eq=False)
class Output:
    """What one of the two sides gives for a batch."""

    logits: Floats  # [B, C], or [B, S, C] of a labeller
    embedding: Floats  # [B, D]
    rounded: Output | None = None  # of the eager model in half precision, to measure by

    def rows(self, members: Sequence[int] | slice) -> Output:
        """Return some of the rows."""
        rounded = self.rounded.rows(members) if self.rounded else None
        return Output(self.logits[members], self.embedding[members], rounded)

    @classmethod
    def joined(cls, parts: Sequence[Output]) -> Output:
        """Return the rows of several batches of one shape as one."""
        rounded = [part.rounded for part in parts if part.rounded]
        return cls(
            np.concatenate([part.logits for part in parts]),
            np.concatenate([part.embedding for part in parts]),
            cls.joined(rounded) if rounded else None,
        )


@dataclass(frozen=True)
class Pair:
    """A graph and its eager model; with `half` logits are held to its bound besides."""

    model: nn.Module  # in float64 with `half`
    session: Session
    half: Half | None = None


def certify_encoding(
    pair: Pair,
    contract: EncodingContract,
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
    certifier = _TextCertifier(pair, comparison, contract.vocab_size)
    num_texts = sum(map(len, groups))
    order = rng.permutation(num_texts).tolist()
    done = 0
    for num_runs in certifier.check(groups, order):
        done += num_runs
        progress(done, (1 + len(BATCH_SIZES)) * num_texts)
    certifier.check_half()
    covered: Covered = {
        "lengths": sorted({len(text) for group in groups for text in group}),
        "padded_rows": num_texts,
        "batch_sizes": [1, *BATCH_SIZES],
        "most_rows": MOST_ROWS,
        "undecided_labels": comparison.tokens_undecided,
    }
    return num_texts, covered


def certify_images(
    pair: Pair, contract: ImageContract, comparison: Comparison, progress: Progress
) -> tuple[int, Covered]:
    """Do as `certify_encoding` with images of noise, of different brightness and contrast."""
    pixels = draw_images(contract)
    certifier = _Certifier(pair, comparison)
    given = torch.from_numpy(pixels)
    certifier.check_rows({PIXEL_VALUES: pixels}, given, "image", largest_batch(1))
    certifier.check_half()
    progress(NUM_IMAGES, NUM_IMAGES)
    covered: Covered = {
        "images": NUM_IMAGES,
        "batch_sizes": [1, *BATCH_SIZES],
        "most_rows": MOST_ROWS,
        "undecided_labels": comparison.tokens_undecided,
    }
    return NUM_IMAGES, covered


class _Certifier:
    """The two sides, and what was found so far."""

    def __init__(self, pair: Pair, comparison: Comparison) -> None:
        self.comparison = comparison
        self._pair = pair
        self._rows_in_half: list[_RowsInHalf] = []

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
        expected = self._eager(eager_input)
        rows = list(range(len(eager_input)))
        alone = Output.joined([self._run(inputs, [i]) for i in rows])
        self._compare(alone, expected, lambda i: f"{what} {i}, alone")
        for members in (*_parts(rows), [i % len(rows) for i in range(most)]):
            self._check_batch(
                self._run(inputs, members),
                alone.rows(members),
                expected.rows(members),
                _place_in_batch(what, members),
            )
        return expected

    def check_half(self) -> None:
        """Hold all rows to the bound as one case: of few numbers some are exact by chance."""
        rows = self._rows_in_half
        if self._pair.half is None:
            return
        found = self._pair.half.found
        for hold, name in ((found.case, "logits"), (found.values, "embedding")):
            places = [place for part in rows for place in part.places[name]]
            ours, exact, rounded = (
                np.concatenate([_flat(getattr(getattr(part, side), name)) for part in rows])
                for side in ("ours", "exact", "rounded")
            )
            hold(ours, exact, rounded, places.__getitem__)

    def _eager(self, given: torch.Tensor) -> Output:
        rounded = _output_of(self._pair.half.model, given) if self._pair.half else None
        exact = _output_of(self._pair.model, given)
        return Output(exact.logits, exact.embedding, rounded)

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
            outputs = self._pair.session.run(
                {name: array[members] for name, array in inputs.items()}
            )
        return Output(outputs[LOGITS], outputs[EMBEDDING])

    def _compare(self, ours: Output, theirs: Output, place: Callable[[int], str]) -> None:
        per_row = ours.logits.size // (ours.logits.shape[-1] * len(ours.logits))

        def place_of_logits(i: int) -> str:
            return place(i // per_row) + (f", token {i % per_row}" if per_row > 1 else "")

        self.comparison.logits(_flat(ours.logits), _flat(theirs.logits), place_of_logits)
        self.comparison.values(ours.embedding, theirs.embedding, place)
        if theirs.rounded:
            places = {
                "logits": [place_of_logits(i) for i in range(len(ours.logits) * per_row)],
                "embedding": [f"{place(i)}, embedding" for i in range(len(ours.embedding))],
            }
            self._rows_in_half.append(_RowsInHalf(ours, theirs, theirs.rounded, places))


class _RowsInHalf(NamedTuple):
    """Rows of a graph in half precision, and the eager model's: exact, and rounded alike."""

    ours: Output
    exact: Output
    rounded: Output
    places: dict[str, list[str]]  # of logits and of embeddings


def _flat(array: Floats) -> Floats:
    return array.reshape(-1, array.shape[-1])


def _output_of(model: nn.Module, given: torch.Tensor) -> Output:
    dtype = next(model.parameters()).dtype
    with torch.inference_mode():
        output = model(given.to(dtype) if given.is_floating_point() else given)
    in_half = dtype in (torch.float16, torch.bfloat16)  # NumPy lacks one of them
    logits, embedding = (
        (part.float() if in_half else part).numpy() for part in (output.logits, output.embedding)
    )
    return Output(logits, embedding)


class _TextCertifier(_Certifier):
    """Texts come with lengths, and may be padded."""

    def __init__(self, pair: Pair, comparison: Comparison, vocab_size: int) -> None:
        super().__init__(pair, comparison)
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(SEED)

    def check(self, groups: Sequence[Sequence[Tokens]], order: Sequence[int]) -> Iterator[int]:
        """Compare texts of one length, then all of them padded, in an order; yield numbers done."""
        texts, expected = [], []
        for group in groups:
            output = self.check_equal_lengths(group)
            for i, text in enumerate(group):
                texts.append(text)
                expected.append(output.rows(slice(i, i + 1)))
            yield len(group)
        for members in _parts(order):
            self.check_padded([texts[i] for i in members], [expected[i] for i in members])
            yield len(members)

    def check_equal_lengths(self, texts: Sequence[Tokens]) -> Output:
        """Compare texts of one length; return the eager model's output."""
        ids = np.array(texts, np.int64)  # [B, S]
        inputs: dict[str, NDArray[np.generic]] = {
            INPUT_IDS: ids,
            LENGTHS: np.full(len(ids), ids.shape[1], np.int64),
        }
        what = f"text of {ids.shape[1]} tokens, number"
        return self.check_rows(inputs, torch.from_numpy(ids), what, largest_batch(ids.shape[1]))

    def check_padded(self, texts: Sequence[Tokens], expected: Sequence[Output]) -> None:
        """Compare texts of different lengths in one batch; what pads them is random tokens."""
        lengths = np.array([len(text) for text in texts], np.int64)
        ids = self._rng.integers(0, self._vocab_size, (len(texts), lengths.max()))
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
        found = self._run({INPUT_IDS: ids, LENGTHS: lengths}, range(len(texts)))
        for row, theirs in enumerate(expected):
            ours = found.rows(slice(row, row + 1))
            if theirs.logits.ndim > 2:  # a label a token
                ours = Output(ours.logits[:, : lengths[row]], ours.embedding)
            self._compare(ours, theirs, _place_padded(int(lengths[row]), ids.shape[1]))


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
