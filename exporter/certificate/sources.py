"""Shows that a source is encoded to the same bits alone and in a group of sources of its length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.slots.batch import Encode, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from exporter.certificate.cases import BATCH_SIZES, largest_batch
from exporter.certificate.comparison import exported_graphs
from exporter.certificate.sides import Sides
from exporter.samples import Tokens

_OTHER_SIZES = (3, 4, 7)


def certify_sources(sides: Sides, sources: Sequence[Tokens]) -> list[int]:
    """Encode all in groups of their length; return how many sources there were in the groups.

    Raises CertificateError at the first difference that the comparison refuses.
    """
    by_length: dict[int, list[Tokens]] = defaultdict(list)
    for source in sources:
        by_length[len(source)].append(source)
    sizes = {1}
    for members in by_length.values():
        alone = np.stack([_encoded(sides.alone, [source], 0)[0] for source in members])
        most = min(largest_batch(len(members[0])), sides.num_rows)
        for numbers in _groups(len(members), most):
            group = [members[i] for i in numbers]
            found = _encoded(sides.batch, group, sides.batch.num_slots - len(group))
            sides.comparison.bits(found, alone[numbers], _place(group))
            sizes.add(len(group))
    return sorted(sizes)


def _groups(count: int, most: int) -> Iterator[list[int]]:
    """Yield groups of `count` members of every size, and some in which they come several times."""
    for size in BATCH_SIZES:
        if size <= most:
            for first in range(0, count, size):
                yield list(range(first, min(first + size, count)))
    for size in (*_OTHER_SIZES, most):
        if size <= most:
            yield [i % count for i in range(size)]


def _encoded(runner: SlotModelRunner, sources: Sequence[Tokens], first: int) -> NDArray[np.generic]:
    """Encode sources in one step, into rows from `first` on; return their keys and values.

    One array of [number of sources, layers, 2, heads, source, head_dim].
    """
    encodes = tuple(Encode(first + i, source) for i, source in enumerate(sources))
    with exported_graphs():
        runner.run(ScheduledBatch((), encodes, (), (), ()))
    memory, length = runner.cache.sources, len(sources[0])
    assert memory is not None
    return np.stack([memory.read(first + i, length) for i in range(len(sources))])


def _place(group: Sequence[Tokens]) -> Callable[[int], str]:
    return lambda i: (
        f"source of {len(group[0])} tokens, encoded as number {i + 1} of {len(group)} in one step"
    )
