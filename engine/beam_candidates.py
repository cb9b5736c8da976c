"""Finds the best continuations of the hypotheses of a beam search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.batch import BeamDraw, Candidate, Draw, Floats
from engine.logit_controls import adjusted, is_controlled
from engine.position_logprobs import ModelLogprobs
from engine.top_logits import likeliest

_Tokens = tuple[NDArray[np.integer], Floats]  # ids and log-probabilities after controls


def best_candidates(
    model: ModelLogprobs, draw: BeamDraw, num_columns: int
) -> tuple[Candidate, ...]:
    """Return the candidates with the largest scores over all hypotheses and tokens, best first.

    Of equals the earlier hypothesis's, then the lower token id. There are fewer than asked for if
    the controls allow no more. As in the beam search of transformers, controls change
    log-probabilities where other strategies have them change logits. Of the likeliest tokens the
    first `num_columns` may be relied on.
    """
    found = [_best_of_beam(model, beam, draw.num_candidates, num_columns) for beam in draw.beams]
    ids = np.concatenate([tokens for tokens, _ in found])
    beams = np.repeat(np.arange(len(found)), [len(tokens) for tokens, _ in found])
    scores = np.concatenate(
        [
            after.astype(np.float64) + score
            for (_, after), score in zip(found, draw.scores, strict=True)
        ]
    )
    order = np.lexsort((ids, beams, -scores))[: draw.num_candidates]
    return tuple(
        _candidate(model, draw, beam, token_id, score)
        for beam, token_id, score in zip(
            beams[order].tolist(), ids[order].tolist(), scores[order].tolist(), strict=True
        )
        if score > -np.inf
    )


def _best_of_beam(
    model: ModelLogprobs, beam: Draw, num_candidates: int, num_columns: int
) -> _Tokens:
    row, logits = beam.logits_row, model.logits
    width = min(num_candidates, model.vocab_size)
    is_free = beam.matcher is None and not is_controlled(beam.params)
    if is_free and width <= num_columns and model.are_outside(beam.banned, row, width):
        return logits.top_ids[row, :width], logits.top_logprobs[row, :width]
    shift = logits.top_logprobs[row, 0] - logits.top_logits[row, 0]
    logprobs = logits.logits[row] + shift
    if beam.banned or not is_free:
        logprobs = adjusted(logprobs, beam)
    ids = likeliest(logprobs, width, logits.top_ids[row])
    return ids, logprobs[ids]


def _candidate(
    model: ModelLogprobs, draw: BeamDraw, beam: int, token_id: int, score: float
) -> Candidate:
    sampled = model.sampled(draw.beams[beam], token_id)
    return Candidate(beam, token_id, score, sampled.logprob, sampled.position)
