"""Shows that the beams of a prompt, or of a source, give the same bits as sequences of their own.

The prompt is computed once and its row copied for every beam; the source is encoded once and read
by all. Then the beams decode different tokens beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.config import EngineConfig
from engine.sampling.logits import StepLogits
from engine.slots.batch import RowOp
from engine.slots.source_index import group_widths
from exporter.certificate.driver import Replay, change, empty
from exporter.certificate.generation_cases import Case, random_case
from exporter.certificate.sides import Eager, Sides
from exporter.samples import SEED, Tokens, random_tokens

NUM_STEPS = 6
PROMPT_TOKENS = 3
SOURCE_TOKENS = (7, 4)  # of the first sources, and of the last ones

_NUM_GROUPS = 10
_WIDEST = EngineConfig().limits.most_sequences  # of a prompt or source
_FIRST_SHORT = 8  # the groups from here on have the other length

# The groups of a step: which prompt or source, and how many beams it has.
Layout = tuple[tuple[int, int], ...]
_LAYOUTS: tuple[Layout, ...] = (
    ((0, 4), (8, 2)),
    ((0, 8), (1, 8)),
    tuple((i, 1) for i in range(8)),
    tuple((i, 2) for i in range(5)),
    ((9, 1), (0, 5), (1, 3), (8, 2)),
)
_MIXED: Layout = ((1, 8), (0, 16), (8, 2))  # beside further beams


class _Beam(NamedTuple):
    case: Case
    tokens: Tokens
    alone: StepLogits
    eager: Eager


def layouts(num_rows: int) -> list[Layout]:
    """Return the steps to try with so many rows.

    They are a group of every width that is computed otherwise, as wide as a request may ask for and
    there are rows, then several groups where there is room, and one step that fills all rows.
    """
    found: list[Layout] = [((0, width),) for width in group_widths(min(_WIDEST, num_rows))]
    found += [layout for layout in _LAYOUTS if _width(layout) <= num_rows]
    if (rest := num_rows - _width(_MIXED)) > 0:
        whole, last = divmod(rest, _WIDEST)
        found.append((*_MIXED, *[(0, _WIDEST)] * whole, *[(0, last)] * bool(last)))
    else:
        found.append(tuple((i % _NUM_GROUPS, 1) for i in range(num_rows)))
    return found


def _width(layout: Layout) -> int:
    return sum(width for _, width in layout)


def certify_beams(sides: Sides) -> tuple[int, list[int]]:
    """Compare all layouts; return the number of cases and how many beams there were in a group.

    Raises CertificateError at the first difference that the comparison refuses.
    """
    tried = layouts(sides.num_rows)
    groups = _make_groups(sides, tried)
    for layout in tried:
        _check_layout(sides, [groups[i][:width] for i, width in layout])
    sizes = {width for layout in tried for _, width in layout}
    return sum(map(len, groups)), sorted(sizes)


def _make_groups(sides: Sides, tried: Sequence[Layout]) -> list[list[_Beam]]:
    contract, rng = sides.contract, np.random.default_rng(SEED)
    length = min(PROMPT_TOKENS, contract.cache.max_len)
    num_tokens = min(NUM_STEPS, contract.cache.max_len - length + 1)
    groups = []
    for i in range(_NUM_GROUPS):
        case = random_case(
            rng,
            contract,
            source_length=SOURCE_TOKENS[i >= _FIRST_SHORT],
            prompt_length=length,
            num_tokens=num_tokens,
        )
        width = max((width for layout in tried for j, width in layout if j == i), default=0)
        tokens = [random_tokens(rng, contract.vocab_size, num_tokens) for _ in range(width)]
        groups.append(_run_alone(sides, [case] * width, tokens))
    return groups


def _run_alone(sides: Sides, cases: Sequence[Case], tokens: Sequence[Tokens]) -> list[_Beam]:
    if not cases:
        return []
    eager = sides.eager(cases, tokens)
    beams = []
    for case, given, theirs in zip(cases, tokens, eager, strict=True):
        seen = sides.run_alone(case, given)
        sides.compare(seen, theirs, case, "alone")
        beams.append(_Beam(case, given, seen, theirs))
    return beams


def _check_layout(sides: Sides, groups: Sequence[Sequence[_Beam]]) -> None:
    asked = sides.asked(align_every=1)
    leaders = Replay(sides.batch, [beams[0].case for beams in groups], asked)
    empty(sides.batch, has_source=sides.contract.cross_cache is not None)
    leaders.encode(leaders.places)
    leaders.prefill(leaders.places)
    for group, beams in enumerate(groups):
        _check(sides, leaders, group, beams[0], 0, f"prompt {group + 1} of {len(groups)} in a step")
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
    replay = Replay(sides.batch, [b.case for b in beams], asked, [b.tokens for b in beams])
    change(sides.batch, copies)
    replay.decode([group for group, _ in members])
    widths = ", ".join(str(len(beams)) for beams in groups)
    for i, (beam, (group, number)) in enumerate(zip(beams, members, strict=True)):
        how = f"beam {number + 1} of group {group + 1} in groups of {widths}"
        _check(sides, replay, i, beam, beam.case.num_logits - replay.num_seen(i), how)


def _check(sides: Sides, replay: Replay, i: int, beam: _Beam, first: int, how: str) -> None:
    if replay.num_seen(i):
        sides.compare_bits(replay.seen(i), beam.alone, beam.eager, first, beam.case, how)
