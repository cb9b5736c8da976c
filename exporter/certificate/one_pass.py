"""Compares a one-pass package with its eager model: texts of every length, or images.

Each item runs alone, in batches of its own length, and padded among longer ones. The other side is
the eager model without a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from engine.one_pass.batch import Graph
from engine.one_pass.item_encoder import EncodedItem
from engine.package.graph_io import EMBEDDING, LOGITS
from engine.package.manifest import EncodingContract, ImageContract
from exporter.certificate.cases import (
    BATCH_SIZES,
    Covered,
    Progress,
    affordable_sizes,
    counted_length,
    largest_batch,
)
from exporter.certificate.comparison import Comparison, Floats
from exporter.certificate.driver import predict
from exporter.certificate.half_comparison import Half
from exporter.certificate.one_pass_cases import (
    NUM_IMAGES,
    Text,
    draw_images,
    eager_inputs,
    given_texts,
    image_items,
    random_groups,
    run_eager,
    text_items,
)
from exporter.certificate.random_rounding import RandomRounding, Rounded
from exporter.samples import SEED, Tokens

_PATCH = 16**2  # pixels, as most models have them
PADDED_PER_LENGTH = 2  # texts; the engine pads nothing, and padding costs as much as text

EagerInputs = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Output:
    """What one of the two sides gives for a batch, by the names of a graph's outputs."""

    # logits [B, C], or [B, S, C] of a labeller; embedding [B, D]; a model may lack one
    parts: Mapping[str, Floats]
    rounded: Output | None = None  # of the eager model in half precision, to measure by
    again: Callable[[int], Output] | None = None  # of that: rounded at random, by a seed

    def rows(self, members: Sequence[int] | slice) -> Output:
        """Return some of the rows."""
        again = self.again
        return Output(
            {name: part[members] for name, part in self.parts.items()},
            self.rounded.rows(members) if self.rounded else None,
            again and (lambda seed: again(seed).rows(members)),
        )

    def cut(self, length: int) -> Output:
        """Return the logits of the first tokens only, where every token has some."""
        parts = {name: part[:, :length] if part.ndim > 2 else part for name, part in self.items}
        return Output(parts, self.rounded)

    def to_hold(self, name: str) -> Rounded:
        """Return a part of what the eager model gives in half precision, positions by numbers."""
        again = self.again
        assert again is not None, "it can be rounded again"
        return Rounded(flat(self.parts[name]), lambda seed: flat(again(seed).parts[name]))

    @property
    def items(self) -> list[tuple[str, Floats]]:
        """Names and arrays."""
        return list(self.parts.items())

    @classmethod
    def joined(cls, outputs: Sequence[Output]) -> Output:
        """Return the rows of several batches of one shape as one."""
        parts = {
            name: np.concatenate([output.parts[name] for output in outputs])
            for name in outputs[0].parts
        }
        return cls(parts)


@dataclass(frozen=True)
class Pair:
    """A graph and its eager model; with `half` logits are held to its bound besides."""

    model: nn.Module  # in float64 with `half`
    graph: Graph
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
    groups = random_groups(rng, contract)
    counted = counted_length(len(group[0].ids) for group in groups)
    groups += [[sample] for sample in given_texts(samples, contract)]
    certifier = _TextCertifier(pair, comparison, contract.vocab_size, counted)
    num_texts = sum(map(len, groups))
    num_padded = sum(min(PADDED_PER_LENGTH, len(group)) for group in groups)
    done = 0
    for num_runs in certifier.check(groups):
        done += num_runs
        progress(done, num_texts + num_padded)
    certifier.check_half()
    covered: Covered = {
        "lengths": sorted({len(text.ids) for group in groups for text in group}),
        "padded_rows": num_padded,
        "batch_sizes": [1, *BATCH_SIZES],
        "row_counts": list(range(1, largest_batch(counted) + 1)),
        "undecided_labels": comparison.tokens_undecided,
    }
    return num_texts, covered


def certify_images(
    pair: Pair, contract: ImageContract, comparison: Comparison, progress: Progress
) -> tuple[int, Covered]:
    """Do as `certify_encoding` with images of noise, of different brightness and contrast."""
    pixels = draw_images(contract)
    certifier = _Certifier(pair, comparison)
    given = (torch.from_numpy(pixels),)
    sizes = affordable_sizes(largest_batch(1), _arithmetic(pair.model, contract))
    certifier.check_rows(image_items(pixels), given, "image", sizes)
    certifier.check_half()
    progress(NUM_IMAGES, NUM_IMAGES)
    covered: Covered = {
        "images": NUM_IMAGES,
        "batch_sizes": [1, *BATCH_SIZES],
        "row_counts": sorted({1, *BATCH_SIZES, *sizes}),
        "undecided_labels": comparison.tokens_undecided,
    }
    return NUM_IMAGES, covered


def _arithmetic(model: nn.Module, contract: ImageContract) -> float:
    """Return about how much an image takes: the model's parameters times its patches."""
    num_parameters = sum(weight.numel() for weight in model.parameters())
    return num_parameters * max(1, contract.size**2 // _PATCH)


class _Certifier:
    """The two sides, and what was found so far."""

    def __init__(self, pair: Pair, comparison: Comparison) -> None:
        self.comparison = comparison
        self._pair = pair
        self._rows_in_half: list[_RowsInHalf] = []

    def check_rows(
        self,
        items: Sequence[EncodedItem],
        eager_input: EagerInputs,
        what: str,
        sizes: Iterable[int],
    ) -> Output:
        """Compare rows of one shape, alone and in batches; return the eager model's output.

        In batches of `sizes` they come again and again, where they do not count.
        """
        expected = self._eager(eager_input)
        rows = list(range(len(items)))
        alone = Output.joined([self._run([items[i]]) for i in rows])
        self._compare(alone, expected, lambda i: f"{what} {i}, alone")

        def check_batch(members: Sequence[int]) -> None:
            self._check_batch(
                self._run([items[i] for i in members]),
                alone.rows(members),
                expected.rows(members),
                _place_in_batch(what, members),
            )

        for members in _batches(rows):
            check_batch(members)
        with self.comparison.copies():
            for size in sizes:
                check_batch([i % len(rows) for i in range(size)])
        return expected

    def check_half(self) -> None:
        """Hold all rows to the bound as one case: of few numbers some are exact by chance."""
        rows = self._rows_in_half
        if self._pair.half is None:
            return
        found = self._pair.half.found
        for name, hold in ((LOGITS, found.case), (EMBEDDING, found.values)):
            if name in rows[0].ours.parts:
                places = [place for part in rows for place in part.places[name]]
                ours, exact = (
                    np.concatenate([flat(output.parts[name]) for output in side])
                    for side in zip(*((part.ours, part.exact) for part in rows), strict=True)
                )
                rounded = Rounded.joined([part.rounded.to_hold(name) for part in rows])
                hold(ours, exact, rounded, places.__getitem__)

    def _eager(self, given: EagerInputs) -> Output:
        exact = _output_of(self._pair.model, given)
        half = self._pair.half
        return replace(exact, rounded=rounded_output(half.model, given)) if half else exact

    def _check_batch(
        self, found: Output, alone: Output, expected: Output, place: Callable[[int], str]
    ) -> None:
        """Hold a batch against its rows alone, and where they may differ, against eager ones."""
        equal = True
        for name, part in found.items:
            equal &= self.comparison.bits(part, alone.parts[name], place)
        if not equal:
            self._compare(found, expected, place)

    def _run(self, items: Sequence[EncodedItem], lengths: Sequence[int] = ()) -> Output:
        return Output(predict(self._pair.graph, items, lengths))

    def _compare(self, ours: Output, theirs: Output, place: Callable[[int], str]) -> None:
        places: dict[str, list[str]] = {}
        if LOGITS in theirs.parts:
            logits, eager = ours.parts[LOGITS], theirs.parts[LOGITS]
            per_row = logits.size // (logits.shape[-1] * len(logits))

            def place_of_logits(i: int) -> str:
                return place(i // per_row) + (f", token {i % per_row}" if per_row > 1 else "")

            self.comparison.logits(flat(logits), flat(eager), place_of_logits)
            places[LOGITS] = [place_of_logits(i) for i in range(len(logits) * per_row)]
        if EMBEDDING in theirs.parts:
            vectors = ours.parts[EMBEDDING]
            self.comparison.values(vectors, theirs.parts[EMBEDDING], place)
            places[EMBEDDING] = [f"{place(i)}, embedding" for i in range(len(vectors))]
        if theirs.rounded:
            self._rows_in_half.append(_RowsInHalf(ours, theirs, theirs.rounded, places))


class _RowsInHalf(NamedTuple):
    """Rows of a graph in half precision, and the eager model's: exact, and rounded alike."""

    ours: Output
    exact: Output
    rounded: Output
    places: dict[str, list[str]]  # of logits and of embeddings


def flat(array: Floats) -> Floats:
    """Return numbers of all positions, [N, V]."""
    return array.reshape(-1, array.shape[-1])


def _output_of(model: nn.Module, given: EagerInputs) -> Output:
    output = run_eager(model, given)._asdict()
    parts = {name: part for name, part in output.items() if part is not None}
    return Output({name: _array(part) for name, part in parts.items()})


def rounded_output(model: nn.Module, given: EagerInputs) -> Output:
    """Return what a model in half precision gives, and can give again rounded at random."""

    @lru_cache(maxsize=1)
    def again(seed: int) -> Output:
        with RandomRounding(next(model.parameters()).dtype, seed):
            return _output_of(model, given)

    return replace(_output_of(model, given), again=again)


def _array(values: torch.Tensor) -> Floats:
    """Return an array; NumPy lacks a type of half precision."""
    in_half = values.dtype in (torch.float16, torch.bfloat16)
    array: Floats = (values.float() if in_half else values).numpy()
    return array


class _TextCertifier(_Certifier):
    """Texts come with lengths, and may be padded."""

    def __init__(
        self, pair: Pair, comparison: Comparison, vocab_size: int, counted_length: int
    ) -> None:
        """Texts of `counted_length` are tried in batches of every size."""
        super().__init__(pair, comparison)
        self._vocab_size = vocab_size
        self._counted_length = counted_length
        self._rng = np.random.default_rng(SEED)

    def check(self, groups: Sequence[Sequence[Text]]) -> Iterator[int]:
        """Compare texts of one length, then some of each padded; yield numbers done."""
        padded: list[tuple[Text, Output]] = []
        for group in groups:
            output = self.check_equal_lengths(group)
            for i, text in enumerate(group[:PADDED_PER_LENGTH]):
                padded.append((text, output.rows(slice(i, i + 1))))
            yield len(group)
        for members in _dealt(self._rng.permutation(len(padded)).tolist()):
            self.check_padded(*zip(*(padded[i] for i in members), strict=True))
            yield len(members)

    def check_equal_lengths(self, texts: Sequence[Text]) -> Output:
        """Compare texts of one length; return the eager model's output."""
        length = len(texts[0].ids)
        what = f"text of {length} tokens, number"
        most = largest_batch(length)
        is_counted = length == self._counted_length and len(texts) > 1
        sizes = range(2, most + 1) if is_counted else (most,)
        return self.check_rows(text_items(texts), eager_inputs(texts), what, sizes)

    def check_padded(self, texts: Sequence[Text], expected: Sequence[Output]) -> None:
        """Compare texts of different lengths in one batch; what pads them is random tokens."""
        lengths = [len(text.ids) for text in texts]
        ids = self._rng.integers(0, self._vocab_size, (len(texts), max(lengths)))
        padded = [_padded(text, row) for text, row in zip(texts, ids.tolist(), strict=True)]
        found = self._run(text_items(padded), lengths)
        for row, theirs in enumerate(expected):
            ours = found.rows(slice(row, row + 1)).cut(lengths[row])
            self._compare(ours, theirs, _place_padded(lengths[row], max(lengths)))


def _padded(text: Text, padding: Sequence[int]) -> Text:
    """Return a text with the end of the padding behind it, in types the second text of a pair."""
    rest = tuple(padding[len(text.ids) :])
    types = None if text.types is None else (*text.types, *(1 for _ in rest))
    return Text((*text.ids, *rest), types)


def _batches(members: Sequence[int]) -> list[Sequence[int]]:
    """Return a batch of each size, and of the largest as many as have every member."""
    *smaller, largest = BATCH_SIZES
    batches = [members[:size] for size in smaller]
    batches += [members[first : first + largest] for first in range(0, len(members), largest)]
    return [batch for batch in batches if len(batch) > 1]


def _dealt(members: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield batches of every size in turn, until every member was in one."""
    first = 0
    for size in cycle(BATCH_SIZES):
        if first >= len(members):
            return
        yield members[first : first + size]
        first += size


def _place_in_batch(what: str, members: Sequence[int]) -> Callable[[int], str]:
    return lambda i: f"{what} {members[i]}, in a batch of {len(members)}"


def _place_padded(length: int, padded_length: int) -> Callable[[int], str]:
    return lambda _: f"text of {length} tokens, padded to {padded_length}"
