"""Lets the sequences of a beam search go on as its hypotheses do."""

from __future__ import annotations

from engine.sampling.beam_search import BeamStep
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.sequence import Request, Sequence


def continue_beams(cache: KVCache, request: Request, step: BeamStep) -> list[Sequence]:
    """Give every new hypothesis a sequence: one child of a parent stays, the others are forks.

    Returns the sequences of those hypotheses that no other continues.
    """
    old, heirs = request.beams, dict.fromkeys(step.parents)
    beams = {parent: old[parent] for parent in heirs}  # the first child takes over its sequence
    staying, held = set(beams.values()), set(old)
    spare = [sequence for sequence in request.sequences if sequence not in staying]
    spare.sort(key=lambda sequence: sequence not in held)
    request.beams = []
    for parent in step.parents:
        if parent in beams:
            request.beams.append(beams.pop(parent))
        else:
            request.beams.append(spare.pop(0))
            _fork(cache, old[parent], request.beams[-1])
    ended = [sequence for sequence in spare if sequence in held]
    for sequence in ended:
        cache.drop(sequence)
    for sequence, token_id in zip(request.beams, step.tokens, strict=True):
        sequence.take(token_id)
    return ended


def _fork(cache: KVCache, parent: Sequence, child: Sequence) -> None:
    cache.fork(parent, child)
    child.tokens = parent.tokens.copy()
    child.num_computed, child.num_generated = parent.num_computed, parent.num_generated
    child.matcher = parent.matcher.fork() if parent.matcher is not None else None
