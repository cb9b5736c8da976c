"""Finds the best continuations of the hypotheses of a beam search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.requests.request import SamplingParams
from engine.sampling.draws import BeamExpansion, Candidate, Draw
from engine.sampling.logit_controls import adjusted, is_free
from engine.sampling.logits import Floats
from engine.sampling.logprobs import ModelLogprobs
from engine.sampling.top_k import MAX_COLUMNS, likeliest

# If bans leave less of all probability, it is added up anew: 1 less the rest would be inexact.
_LEAST_LEFT = 0.5

_Tokens = tuple[NDArray[np.integer], Floats]  # ids and log-probabilities after controls


def best_candidates(
    model: ModelLogprobs, draws: Sequence[BeamExpansion]
) -> list[tuple[Candidate, ...]]:
    """Return for each search the candidates with the largest scores over all its hypotheses.

    Best first; of equals the earlier hypothesis's, then the lower token id. There are fewer than
    asked for if the controls allow no more. As in the beam search of transformers, controls change
    log-probabilities where other strategies have them change logits; then `renormalize` adds what
    makes those of a row probabilities again.
    """
    found: list[tuple[Candidate, ...]] = [()] * len(draws)
    alike: dict[tuple[int, int], list[int]] = {}
    whole: list[int] = []  # searches that look at whole rows
    for i, draw in enumerate(draws):
        if _is_plain(model, draw):
            alike.setdefault((len(draw.beams), draw.num_candidates), []).append(i)
        else:
            whole.append(i)
    if whole:
        model.logits.fetch(beam.logits_row for i in whole for beam in draws[i].beams)
    for i in whole:
        found[i] = _best_of_search(model, draws[i])
    for places in alike.values():
        for i, best in zip(places, _best_of_plain(model, [draws[i] for i in places]), strict=True):
            found[i] = best
    return found


def num_columns(params: SamplingParams) -> int:
    """Return how many of a row's likeliest tokens to look at; more come from whole rows."""
    # One that goes on and one for each way to end, for every beam.
    return min(params.beam_width * (2 + len(params.stop_token_ids)), MAX_COLUMNS)


def reads_rows(draw: BeamExpansion) -> bool:
    """Say whether a search may look at whole rows of logits, beside the likeliest tokens."""
    return draw.beams[0].params.logprobs is not None or any(
        beam.banned or not is_free(beam) or draw.num_candidates > num_columns(beam.params)
        for beam in draw.beams
    )


def _is_plain(model: ModelLogprobs, draw: BeamExpansion) -> bool:
    """Say whether the likeliest tokens of the rows, and their scores, are all there is to it."""
    return draw.beams[0].params.logprobs is None and all(
        _has_columns(model, beam, draw.num_candidates)
        and _has_free_columns(model, beam, draw.num_candidates)
        and not (beam.params.renormalize and beam.banned)
        for beam in draw.beams
    )


def _has_columns(model: ModelLogprobs, beam: Draw, num_candidates: int) -> bool:
    """Say whether, but for bans, candidates are among the likeliest tokens of the row."""
    width = min(num_candidates, model.vocab_size)
    return is_free(beam) and width <= num_columns(beam.params)


def _has_free_columns(model: ModelLogprobs, beam: Draw, num_candidates: int) -> bool:
    """Say whether none of the likeliest tokens is banned."""
    width = min(num_candidates, model.vocab_size)
    return not beam.banned or model.are_outside(beam.banned, beam.logits_row, width)


def _best_of_plain(
    model: ModelLogprobs, draws: Sequence[BeamExpansion]
) -> Iterator[tuple[Candidate, ...]]:
    """Work on searches with as many beams and candidates each together."""
    logits, width = model.logits, min(draws[0].num_candidates, model.vocab_size)
    rows = np.array([[beam.logits_row for beam in draw.beams] for draw in draws])  # [R, G]
    ids = logits.top_ids[rows][..., :width].reshape(len(draws), -1)  # [R, G * width]
    scores = logits.top_logprobs[rows][..., :width].astype(np.float64)
    scores += np.array([draw.scores for draw in draws])[..., None]
    flat = scores.reshape(ids.shape)
    # Columns are in the order in which equals come.
    order = (-flat).argsort(axis=1, kind="stable")[:, : draws[0].num_candidates]
    beams, best = order // width, np.take_along_axis(flat, order, axis=1)
    ids = np.take_along_axis(ids, order, axis=1)
    logprobs = model.logprobs(np.take_along_axis(rows, beams, axis=1), order % width)
    for columns in zip(beams.tolist(), ids.tolist(), best.tolist(), logprobs.tolist(), strict=True):
        yield tuple(c for c in map(Candidate, *columns) if c.score > -np.inf)


def _best_of_search(model: ModelLogprobs, draw: BeamExpansion) -> tuple[Candidate, ...]:
    found = [_best_of_beam(model, beam, draw.num_candidates) for beam in draw.beams]
    ids = np.concatenate([tokens for tokens, _ in found])
    beams = np.repeat(np.arange(len(found)), [len(tokens) for tokens, _ in found])
    scores = np.concatenate(
        [
            after.astype(np.float64) + score
            for (_, after), score in zip(found, draw.scores, strict=True)
        ]
    )
    order = np.lexsort((ids, beams, -scores))[: draw.num_candidates]
    candidates = []
    for beam, token_id, score in zip(
        beams[order].tolist(), ids[order].tolist(), scores[order].tolist(), strict=True
    ):
        if score > -np.inf:
            sampled = model.sampled(draw.beams[beam], token_id)
            candidate = Candidate(beam, token_id, score, sampled.logprob, sampled.position)
            candidates.append(candidate)
    return tuple(candidates)


def _best_of_beam(model: ModelLogprobs, beam: Draw, num_candidates: int) -> _Tokens:
    row, logits = beam.logits_row, model.logits
    width = min(num_candidates, model.vocab_size)
    if beam.forced is not None:  # at no cost, as in transformers
        return np.array([beam.forced]), np.zeros(1, np.float32)
    if _has_columns(model, beam, num_candidates) and _has_free_columns(model, beam, num_candidates):
        left = 1.0  # the probability of all tokens that are not banned
        if beam.params.renormalize:
            left -= sum(math.exp(model.logprob(row, i)) for i in {*beam.banned})
        if left >= _LEAST_LEFT:
            return logits.top_ids[row, :width], logits.top_logprobs[row, :width] - math.log(left)
    shift = logits.top_logprobs[row, 0] - logits.top_logits[row, 0]
    logprobs = adjusted(logits.logits[row] + shift, beam)
    ids = likeliest(logprobs, width, logits.top_ids[row])
    log_of_sum = 0.0
    if beam.params.renormalize and (largest := float(logprobs.max())) > -math.inf:
        total = np.exp(logprobs - largest).sum(dtype=np.float64)
        log_of_sum = largest + math.log(total)
    return ids, logprobs[ids] - log_of_sum
