"""Plans the calls that encode a step's sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.package.graph_io import INPUT_IDS, PAST_CROSS, PRESENT_CROSS, layer_names
from engine.session import Session
from engine.slots.batch import Encode
from engine.slots.calls.graph_call import GraphCall, rows_of
from engine.slots.rows import SlotCache
from engine.slots.step_block import StepBlock


class EncodeCalls:
    """Fills cross keys and values: a call for the sources of one length in neighbouring rows.

    Or, with `most_sources` 1, for every source: kernels of a device may be others for more rows.
    """

    def __init__(
        self,
        encoder: Session,
        cache: SlotCache,
        block: StepBlock,
        *,
        most_sources: int | None = None,
    ) -> None:
        """A call has at most so many sources; None: all that go together."""
        self._encoder = encoder
        self._most = most_sources
        self._cache = cache
        self._block = block
        num_layers = len(cache.cross_layers)
        self._past = layer_names(PAST_CROSS, num_layers)
        self._present = layer_names(PRESENT_CROSS, num_layers)

    def plan(self, encodes: Sequence[Encode]) -> Iterator[GraphCall]:
        """Give the calls of a step, counting their sources as encoded."""
        for row, sources in _together(encodes, self._most):
            last = row + len(sources)
            ids = self._block.add(INPUT_IDS, sources)  # (B, S)
            rows = list(rows_of(self._cache.cross_layers, row, last))
            inputs = {INPUT_IDS: ids, **dict(zip(self._past, rows, strict=True))}
            outputs = dict(zip(self._present, rows, strict=True))
            self._cache.source_lengths[row:last] = len(sources[0])
            yield GraphCall(self._encoder.bind(), inputs, outputs)


def _together(
    encodes: Sequence[Encode], most: int | None
) -> Iterable[tuple[int, list[tuple[int, ...]]]]:
    """Group sources of one length in neighbouring rows, at most so many: first row, sources.

    Sources of other lengths would have to be padded, and padding changes bits.
    """
    group: list[Encode] = []
    for encode in sorted(encodes):
        if group and (
            len(group) == most
            or encode.row != group[-1].row + 1
            or len(encode.source_ids) != len(group[-1].source_ids)
        ):
            yield group[0].row, [member.source_ids for member in group]
            group = []
        group.append(encode)
    if group:
        yield group[0].row, [member.source_ids for member in group]
