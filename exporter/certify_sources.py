"""Shows that a source is encoded to the same bits alone and in a group of sources of its length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.batch import Encode, ScheduledBatch
from engine.model_runner import SlotModelRunner
from exporter.cases import BATCH_SIZES, Tokens
from exporter.comparison import exported_graphs
from exporter.sides import Sides


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
        for size in BATCH_SIZES:
            for first in range(0, len(members), size):
                group = members[first : first + size]
                found = _encoded(sides.batch, group, sides.batch.num_slots - len(group))
                solo = alone[first : first + len(group)]
                sides.comparison.bits(found, solo, _place(group))
                sizes.add(len(group))
    return sorted(sizes)


def _encoded(runner: SlotModelRunner, sources: Sequence[Tokens], first: int) -> NDArray[np.generic]:
    """Encode sources in one step, into rows from `first` on; return their keys and values.

    One array of [number of sources, 2 * layers, heads, source, head_dim].
    """
    encodes = tuple(Encode(first + i, source) for i, source in enumerate(sources))
    with exported_graphs():
        runner.run(ScheduledBatch((), encodes, (), (), ()))
    rows, length = slice(first, first + len(sources)), len(sources[0])
    written = [
        rows_of[rows, :, :length] for layer in runner.cache.cross_layers for rows_of in layer
    ]
    return np.stack(written, axis=1)


def _place(group: Sequence[Tokens]) -> Callable[[int], str]:
    return lambda i: (
        f"source of {len(group[0])} tokens, encoded as number {i + 1} of {len(group)} in one step"
    )
