"""Shows that a row gives the same bits with every number of rows that a step may decode.

A kernel may compute otherwise from some number of rows on, or one row more than its tile has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from engine.sampling.logits import StepLogits
from engine.slots.batch import RowOp
from exporter.certificate.driver import Replay, change, decode, empty, joined, part_of
from exporter.certificate.generation_cases import Case, random_case
from exporter.certificate.sides import Eager, Sides
from exporter.samples import SEED

_NUM_CASES = 8  # the rows behind them are copies
_PROMPT_TOKENS = (2, 3, 4)  # of one case after the other
_SOURCE_TOKENS = 5
_LAST = slice(-1, None)


class _Decoded(NamedTuple):
    """What a decode call gives for a case."""

    case: Case
    token: int  # which the call takes
    alone: StepLogits
    eager: Eager


def certify_row_counts(sides: Sides) -> tuple[int, list[int]]:
    """Decode one row, two, and so on; return the number of cases and which numbers of rows.

    Raises CertificateError at the first difference that the comparison refuses.
    """
    count = min(_NUM_CASES, sides.num_rows)
    decoded = [_run_alone(sides, case) for case in _make_cases(sides, count)]
    _fill_rows(sides, [one.case for one in decoded])
    rows = [decoded[row % count] for row in range(sides.num_rows)]
    alone = joined([one.alone for one in rows])
    eager = Eager.joined([one.eager for one in rows])
    tried = _counts(sides.num_rows, sides.batch.buckets)
    for num_rows in tried:
        counted = slice(0, num_rows)
        step = _decode(sides, rows[counted])
        names = [f"{one.case}, row {i + 1} of {num_rows}" for i, one in enumerate(rows[counted])]
        solo, theirs = part_of(alone, counted), eager.part(counted)
        with sides.comparison.copies():  # of a few, which would decide what a format loses
            sides.compare_rows(step, solo, theirs, names.__getitem__)
    return count, tried


def _counts(num_rows: int, buckets: Sequence[int]) -> list[int]:
    """Return every number of rows; where calls are padded, the largest and least of each call."""
    if not buckets:
        return list(range(1, num_rows + 1))
    return sorted({1, *buckets, *(bucket + 1 for bucket in buckets[:-1])})


def _make_cases(sides: Sides, count: int) -> list[Case]:
    contract, rng = sides.contract, np.random.default_rng(SEED)
    limit = contract.cache.max_len
    cases = []
    for i in range(count):
        length = max(1, min(_PROMPT_TOKENS[i % len(_PROMPT_TOKENS)], limit - 1))
        case = random_case(
            rng,
            contract,
            source_length=_SOURCE_TOKENS,
            prompt_length=length,
            num_tokens=1,
            banned=sides.comparison.banned,
        )
        # Of a prompt that stands alone its own token is decoded, behind a longer one another.
        is_alone = bool(case.pieces(sides.chunk)[1])
        cases.append(case if is_alone else replace(case, num_tokens=2))
    return cases


def _run_alone(sides: Sides, case: Case) -> _Decoded:
    seen, tokens, eager = sides.check_alone(case)
    token = tokens[0] if case.num_tokens > 1 else case.prompt[-1]
    return _Decoded(case, token, part_of(seen, _LAST), eager.part(_LAST))


def _fill_rows(sides: Sides, cases: Sequence[Case]) -> None:
    """Compute what stands before the tokens that are decoded; rows behind the cases are copies."""
    has_source = sides.contract.cross_cache is not None
    replay = Replay(sides.batch, cases, sides.asked())
    empty(sides.batch, has_source=has_source)
    replay.encode(replay.places)
    replay.prefill(replay.places)
    copies = [(row % len(cases), row) for row in range(len(cases), sides.num_rows)]
    ops = [RowOp("copy", *copy) for copy in copies]
    change(sides.batch, ops + [RowOp("copy_source", *copy) for copy in copies if has_source])


def _decode(sides: Sides, rows: Sequence[_Decoded]) -> StepLogits:
    """Cut the rows to what was computed before, and decode a token in each of them."""
    lengths = [one.case.num_computed(sides.chunk) for one in rows]
    change(sides.batch, [RowOp("cut", i, i, start=length) for i, length in enumerate(lengths)])
    has_source = sides.contract.cross_cache is not None
    tokens = [one.token for one in rows]
    return decode(sides.batch, tokens, sides.asked(align_every=1), has_source=has_source)
