"""Plays the items of a one-pass model: texts of every length, or images.

Each item runs alone, in batches of its own length, and padded among longer ones. The other side is
the eager model without a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from numpy.typing import NDArray
from torch import nn

from engine.one_pass.batch import Graph
from engine.one_pass.item_encoder import EncodedItem
from engine.package.graph_io import EMBEDDING, LOGITS
from engine.package.manifest import ImageContract
from exporter.models.layers import EncoderOutput
from exporter.prover.cases import BATCH_SIZES, affordable_sizes, largest_batch
from exporter.prover.driver import predict
from exporter.prover.eager import Eager, EagerModel, Floats, Forward, as_array
from exporter.prover.item_cases import run_eager, text_item
from exporter.prover.judge import At, Judge, kinds_of_tokens
from exporter.prover.pair import ALONE
from exporter.samples import SEED

PADDED_PER_LENGTH = 2  # texts; the engine pads nothing, and padding costs as much as text
_PATCH = 16**2  # pixels, as most models have them
WHAT = {LOGITS: "logits", EMBEDDING: "vectors"}

Outputs = Mapping[str, Floats]  # by name: logits (B, C) or (B, S, C); embedding (B, D)


@dataclass(frozen=True)
class Rows:
    """The outputs for rows of one shape, alone and from the eager model."""

    seen: Outputs
    eager: Mapping[str, Eager]  # positions: those of all tokens of a labeller, else rows
    numbers: NDArray[np.int64]  # the rows' places among all items
    length: int  # tokens of each

    def rows(self, members: Sequence[int]) -> Rows:
        """Return some of the rows."""
        eager = {
            name: one.part((np.asarray(members)[:, None] * width + np.arange(width)).ravel())
            for name, one in self.eager.items()
            for width in [len(one.exact) // len(self.numbers)]  # positions of a row
        }
        seen = {name: part[members] for name, part in self.seen.items()}
        return Rows(seen, eager, self.numbers[members], self.length)


class ItemPair:
    """The eager model, its graph, and who judges."""

    def __init__(self, eager: EagerModel, graph: Graph, judge: Judge) -> None:
        self.judge = judge
        self.num_items = 0  # that were played
        self.eager = eager
        self._graph = graph
        self._alone: list[Rows] = []

    def run(self, items: Sequence[EncodedItem], lengths: Sequence[int] = ()) -> Outputs:
        """Run the graph on items as a batch; `lengths` say how much of each counts, if not all."""
        return predict(self._graph, items, lengths)

    def take_alone(self, items: Sequence[EncodedItem], place: Callable[[int], str]) -> Rows:
        """Run items of one length alone, and judge what they give."""
        alone = [self.run([item]) for item in items]
        seen = {name: np.concatenate([one[name] for one in alone]) for name in alone[0]}
        names = [name for name in EncoderOutput._fields if name in seen]
        eager = self.eager.run(forward_of(items), in_own=self.judge.needs_own)
        found = dict(zip(names, eager, strict=True))
        numbers = self.num_items + np.arange(len(items))
        self.num_items += len(items)
        rows = Rows(seen, found, numbers, items[0].length)
        self.take(ALONE, seen, rows, lambda i: f"{place(i)}, alone")
        self._alone.append(rows)
        return rows

    def told(self) -> tuple[Outputs, Outputs]:
        """Return what all items gave alone, of all positions, and what the eager model gives."""
        names = list(self._alone[0].seen)
        return (
            {
                name: np.concatenate([flat(rows.seen[name]) for rows in self._alone])
                for name in names
            },
            {
                name: np.concatenate([rows.eager[name].exact for rows in self._alone])
                for name in names
            },
        )

    def take_batch(
        self, play: str, seen: Outputs, rows: Rows, place: Callable[[int], str], *, counts: bool
    ) -> None:
        """Hold a batch against its rows alone; judge it, where they may differ and do."""
        equal = [self.judge.bits(part, rows.seen[name], place) for name, part in seen.items()]
        if not all(equal):
            self.take(play, seen, rows, place, counts=counts)

    def take(
        self,
        play: str,
        seen: Outputs,
        rows: Rows,
        place: Callable[[int], str],
        *,
        counts: bool = True,
    ) -> None:
        """Judge what rows give."""
        for name, eager in rows.eager.items():
            at = _at(rows, len(eager.exact) // len(rows.numbers), place)
            self.judge.numbers(play, WHAT[name], flat(seen[name]), eager, at, counts=counts)


def play_texts(
    pair: ItemPair, groups: Sequence[Sequence[EncodedItem]], vocab_size: int, counted: int
) -> Iterator[float]:
    """Play texts, those of one length together, then some of each padded; yield tokens done.

    Texts of the length `counted` come in batches of every size.
    """
    rng = np.random.default_rng(SEED)
    padded: list[tuple[EncodedItem, Rows]] = []
    for group in groups:
        length = group[0].length
        most = largest_batch(length)
        is_counted = length == counted and len(group) > 1
        sizes = range(2, most + 1) if is_counted else (most,)
        what = f"text of {length} tokens, number"
        rows = _play_rows(pair, group, what, sizes)
        padded += [(group[i], rows.rows([i])) for i in range(min(PADDED_PER_LENGTH, len(group)))]
        yield float(length * len(group))
    for members in _dealt(rng.permutation(len(padded)).tolist()):
        texts, rows_of = zip(*(padded[i] for i in members), strict=True)
        lengths = [text.length for text in texts]
        ids = rng.integers(0, vocab_size, (len(texts), max(lengths)))
        longer = [_padded(text, row) for text, row in zip(texts, ids.tolist(), strict=True)]
        found = pair.run(longer, lengths)
        for i, (rows, length) in enumerate(zip(rows_of, lengths, strict=True)):
            place = f"text of {length} tokens, padded to {max(lengths)}"
            one = {name: part[i : i + 1] for name, part in found.items()}
            # Where every token has numbers, those of the padding do not count.
            parts = {n: part[:, :length] if part.ndim > 2 else part for n, part in one.items()}
            pair.take("padded texts", parts, rows, _same(place))
        yield float(sum(lengths))


def texts_work(groups: Sequence[Sequence[EncodedItem]]) -> float:
    """Return how many tokens `play_texts` counts."""
    return float(
        sum(group[0].length * (len(group) + min(PADDED_PER_LENGTH, len(group))) for group in groups)
    )


def play_images(
    pair: ItemPair, images: Sequence[EncodedItem], sizes: Sequence[int]
) -> Iterator[float]:
    """Play images, in batches of `sizes`, too; yield how many are done."""
    _play_rows(pair, images, "image", sizes)
    yield float(len(images))


def image_batches(contract: ImageContract, num_parameters: int) -> list[int]:
    """Return the sizes of batches that a model of so many parameters is tried with."""
    patches = max(1, contract.size**2 // _PATCH)
    return affordable_sizes(largest_batch(1), num_parameters * patches)


def _play_rows(
    pair: ItemPair,
    items: Sequence[EncodedItem],
    what: str,
    sizes: Iterable[int],
) -> Rows:
    """Play rows of one shape, alone and in batches; in those of `sizes` they come again."""
    numbers = list(range(len(items)))
    rows = pair.take_alone(items, lambda i: f"{what} {i}")

    def play(members: Sequence[int], *, counts: bool) -> None:
        found = pair.run([items[i] for i in members])
        pair.take_batch(
            "batches",
            found,
            rows.rows(members),
            lambda i: f"{what} {members[i]}, in a batch of {len(members)}",
            counts=counts,
        )

    # A batch of each size, and of the largest as many as have every item.
    *smaller, largest = BATCH_SIZES
    batches = [numbers[:size] for size in smaller]
    batches += [numbers[first : first + largest] for first in range(0, len(numbers), largest)]
    for members in batches:
        if len(members) > 1:
            play(members, counts=True)
    for size in sizes:
        play([i % len(items) for i in range(size)], counts=False)
    return rows


def forward_of(items: Sequence[EncodedItem]) -> Forward:
    """Return what gives the logits and vectors of items, of all positions."""

    def forward(model: nn.Module) -> list[Floats]:
        output = run_eager(model, items)
        return [flat(as_array(part)) for part in output if part is not None]

    return forward


def flat(array: Floats) -> Floats:
    """Return numbers of all positions, [N, V]."""
    return array.reshape(-1, array.shape[-1])


def _at(rows: Rows, width: int, place: Callable[[int], str]) -> At:
    """Return where the positions of rows are, so many each."""
    count = len(rows.numbers)
    return At(
        np.repeat(rows.numbers, width),
        np.full(count * width, rows.length),
        np.tile(kinds_of_tokens(width), count),
        lambda i: place(i // width) + (f", token {i % width}" if width > 1 else ""),
    )


def _padded(text: EncodedItem, padding: Sequence[int]) -> EncodedItem:
    """Return a text with the end of the padding behind it, in types the second text of a pair."""
    rest = tuple(padding[text.length :])
    types = None if text.token_types is None else (*text.token_types.tolist(), *(1 for _ in rest))
    return text_item((*text.values.tolist(), *rest), types)


def _dealt(members: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield batches of every size in turn, until every member was in one."""
    first = 0
    for size in cycle(BATCH_SIZES):
        if first >= len(members):
            return
        yield members[first : first + size]
        first += size


def _same(place: str) -> Callable[[int], str]:
    return lambda _: place
