"""Moves the hypotheses of a beam search between the rows of the cache."""

from __future__ import annotations

from engine.sampling.beam_search import BeamStep
from engine.scheduling.sequence import Request, Sequence, row_of
from engine.slots.table import SlotTable


def place_beams(slots: SlotTable, request: Request, step: BeamStep) -> None:
    """Give every new hypothesis a row: one child of a parent stays, the others are copies."""
    old, heirs = request.beams, dict.fromkeys(step.parents)
    beams = {parent: old[parent] for parent in heirs}  # whose row goes to its first child
    staying = set(beams.values())
    spare = [sequence for sequence in request.sequences if sequence not in staying]
    spare.sort(key=lambda sequence: sequence.row is None)
    request.beams = []
    for parent in step.parents:
        source = old[parent]
        if parent in beams:
            request.beams.append(beams.pop(parent))
        else:
            request.beams.append(spare.pop(0))
            _copy(slots, source, request.beams[-1])
    for sequence in spare:
        if sequence.row is not None:
            slots.release(sequence)
    for sequence, token_id in zip(request.beams, step.tokens, strict=True):
        sequence.tokens.append(token_id)
        sequence.num_generated += 1
        if sequence.matcher is not None:
            sequence.matcher.advance(token_id)
        if row_of(sequence) >= slots.num_decoding:
            slots.promote(sequence)


def _copy(slots: SlotTable, source: Sequence, target: Sequence) -> None:
    if target.row is None:
        slots.copy(source, target)
    else:
        equal = _common_prefix(source.tokens, target.tokens, source.num_computed)
        slots.overwrite(source, target, equal)
    target.tokens = source.tokens.copy()
    target.num_computed, target.num_generated = source.num_computed, source.num_generated
    target.matcher = source.matcher.fork() if source.matcher is not None else None


def _common_prefix(one: list[int], other: list[int], limit: int) -> int:
    """Return how many of the first tokens are equal, at most `limit`."""
    for i in range(limit):
        if one[i] != other[i]:
            return i
    return limit
