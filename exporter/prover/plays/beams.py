"""Plays the beams of a prompt or a source, which give the same bits as sequences of their own.

The prompt is computed once and its row copied for every beam; the source is encoded once and read
by all. Then the beams decode different tokens beside each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.config import EngineConfig
from engine.slots.batch import RowOp
from engine.slots.calls.source_index import group_widths
from exporter.prover.driver import STEP, Replay, change, empty
from exporter.prover.generation_cases import random_case
from exporter.prover.pair import Alone, GeneratingPair
from exporter.samples import SEED, random_tokens

NUM_STEPS = 6
PROMPT_TOKENS = 3
SOURCE_TOKENS = (7, 4)  # the first sources, and the last ones

_NUM_GROUPS = 10
_WIDEST = EngineConfig().limits.most_sequences  # beams of a prompt or source
_FIRST_SHORT = 8  # the groups from here on have the other length

# The groups of a step: which prompt or source, and how many beams it has.
Layout = tuple[tuple[int, int], ...]
_FEW: Layout = ((0, 4), (8, 2))
_LAYOUTS: tuple[Layout, ...] = (
    _FEW,
    ((0, 8), (1, 8)),
    tuple((i, 1) for i in range(8)),
    tuple((i, 2) for i in range(5)),
    ((9, 1), (0, 5), (1, 3), (8, 2)),
)
_MIXED: Layout = ((1, 8), (0, 16), (8, 2))  # beside further beams


def layouts(num_rows: int, *, few: bool = False) -> list[Layout]:
    """Return the steps to try with so many rows.

    They are a group of every width that is computed otherwise, as wide as a request may ask for and
    there are rows, then several groups where there is room, and one step that fills all rows.
    """
    if few:
        return [layout for layout in (_FEW, ((0, 2), (1, 1))) if _width(layout) <= num_rows]
    found: list[Layout] = [((0, width),) for width in group_widths(min(_WIDEST, num_rows))]
    found += [layout for layout in _LAYOUTS if _width(layout) <= num_rows]
    if (rest := num_rows - _width(_MIXED)) > 0:
        whole, last = divmod(rest, _WIDEST)
        found.append((*_MIXED, *[(0, _WIDEST)] * whole, *[(0, last)] * bool(last)))
    else:
        found.append(tuple((i % _NUM_GROUPS, 1) for i in range(num_rows)))
    return found


def play_beams(pair: GeneratingPair, tried: Sequence[Layout]) -> Iterator[float]:
    """Play all layouts; yield the work of each part."""
    contract, rng = pair.contract, np.random.default_rng(SEED)
    length = min(PROMPT_TOKENS, contract.cache.max_len)
    num_tokens = min(NUM_STEPS, contract.cache.max_len - length + 1)
    groups: list[list[Alone]] = []
    for i in range(_NUM_GROUPS):
        source_length = SOURCE_TOKENS[i >= _FIRST_SHORT]
        case = random_case(
            rng,
            contract,
            source_length=source_length,
            prompt_length=length,
            num_tokens=num_tokens,
        )
        width = _widest(tried, i)
        tokens = [random_tokens(rng, contract.vocab_size, num_tokens) for _ in range(width)]
        seen = [pair.run_alone(case, ids) for ids in tokens]
        groups.append(pair.take_alone([case] * width, seen, tokens) if width else [])
        yield width * _WORK
    for layout in tried:
        _play_layout(pair, [groups[i][:width] for i, width in layout])
        yield _WORK


def num_beams(tried: Sequence[Layout]) -> int:
    """Return how many different beams the layouts have."""
    return sum(_widest(tried, i) for i in range(_NUM_GROUPS))


_WORK = STEP * NUM_STEPS


def _width(layout: Layout) -> int:
    return sum(width for _, width in layout)


def _widest(tried: Sequence[Layout], group: int) -> int:
    return max((width for layout in tried for i, width in layout if i == group), default=0)


def _play_layout(pair: GeneratingPair, groups: Sequence[Sequence[Alone]]) -> None:
    play, asked = "beams", pair.asked(align_every=1)
    leaders = Replay(pair.batch, [beams[0].case for beams in groups], asked)
    empty(pair.batch, has_source=pair.has_source)
    leaders.encode(leaders.places)
    leaders.prefill(leaders.places)
    for group, beams in enumerate(groups):
        how = f"prompt {group + 1} of {len(groups)} in a step"
        pair.take_replayed(play, leaders, group, beams[0], how, ends=False)
    # The leaders stay; behind them come the others, those of all groups in turn.
    widest = max(map(len, groups))
    members = [
        (group, number)
        for number in range(widest)
        for group, beams in enumerate(groups)
        if number < len(beams)
    ]
    beams = [groups[group][number] for group, number in members]
    copies = [RowOp("copy", group, row) for row, (group, _) in enumerate(members) if row != group]
    replay = Replay(pair.batch, [b.case for b in beams], asked, [b.tokens for b in beams])
    change(pair.batch, copies)
    replay.decode([group for group, _ in members])
    widths = ", ".join(str(len(beams)) for beams in groups)
    for i, (beam, (group, number)) in enumerate(zip(beams, members, strict=True)):
        how = f"beam {number + 1} of group {group + 1} in groups of {widths}"
        pair.take_replayed(play, replay, i, beam, how)
