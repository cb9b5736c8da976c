"""Adjusts a row of logits before a token is chosen: penalties, bias, bans and constraints."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from engine.requests.request import SamplingParams
from engine.sampling.draws import Draw
from engine.sampling.logits import Floats


def is_controlled(params: SamplingParams) -> bool:
    """Say whether the tokens of a request are chosen from adjusted logits."""
    return params.constraint is not None or params.controls.change_logits


def is_free(draw: Draw) -> bool:
    """Say whether a token is chosen from the logits as they are, but for bans."""
    return draw.forced is None and draw.matcher is None and not is_controlled(draw.params)


def adjusted(scores: Floats, draw: Draw, out: Floats | None = None) -> Floats:
    """Return the scores of all tokens, [vocab_size], as the draw's controls change them.

    A token that may not come has -inf. If none is left, the bans are lifted, but not the
    constraint, nor `allowed_token_ids`; all have -inf only if a constraint allows none.
    """
    allowed = _allowed(draw, len(scores))
    changed = np.empty_like(scores) if out is None else out
    np.copyto(changed, scores)
    _penalise(changed, draw)
    _ban(changed, draw)
    if allowed is not None:
        changed[~allowed] = -np.inf
    if changed.max() > -np.inf:
        return changed
    if allowed is None:
        return scores
    # The text can only end here (min_new_tokens bans that), or with a token that is banned.
    lifted = np.where(allowed, scores, np.float32(-np.inf))
    if lifted.max() == -np.inf:  # the model rules out all that the constraint allows
        lifted[allowed] = 0.0
    return lifted


def _allowed(draw: Draw, vocab_size: int) -> NDArray[np.bool_] | None:
    """Return the tokens that may come, [vocab_size]; None: all, but for bans."""
    if draw.matcher is not None:
        return draw.matcher.allowed()
    if not (ids := draw.params.controls.allowed_token_ids):
        return None
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[list(ids)] = True
    return allowed


def _penalise(scores: Floats, draw: Draw) -> None:
    controls = draw.params.controls
    if controls.repetition_penalty != 1.0:
        seen = np.array(draw.tokens, np.intp)
        found = scores[seen]
        penalty = np.float32(controls.repetition_penalty)
        scores[seen] = np.where(found < 0, found * penalty, found / penalty)
    if controls.frequency_penalty or controls.presence_penalty:
        counts = Counter(draw.tokens[draw.num_prompt :])
        for token_id, count in counts.items():
            scores[token_id] -= controls.frequency_penalty * count + controls.presence_penalty


def _ban(scores: Floats, draw: Draw) -> None:
    controls = draw.params.controls
    if controls.no_repeat_ngram:
        scores[_ends_of_ngrams(draw.tokens, controls.no_repeat_ngram)] = -np.inf
    for token_id, bias in controls.logit_bias:
        scores[token_id] += bias
    if draw.banned:
        scores[list(draw.banned)] = -np.inf


def _ends_of_ngrams(token_ids: object, size: int) -> NDArray[np.intp]:
    """Return the tokens that would complete an n-gram which the sequence has already."""
    tokens = np.array(token_ids, np.intp)
    num_ngrams = len(tokens) - size + 1
    if num_ngrams <= 0:
        return tokens[:0]
    is_begun = np.ones(num_ngrams, np.bool_)  # by the last tokens of the sequence, once again
    for i in range(size - 1):
        is_begun &= tokens[i : i + num_ngrams] == tokens[num_ngrams + i]
    return tokens[size - 1 :][is_begun]
