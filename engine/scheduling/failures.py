"""Errors of requests that fail in the batch."""

from __future__ import annotations

from engine.errors import EngineFailure, FieldViolation, InvalidRequest, TokenweirError
from engine.scheduling.sequence import Request


def no_token(request: Request) -> TokenweirError:
    """Return why no token can be chosen."""
    constraint = request.asked.params.constraint
    length = max(len(sequence.tokens) for sequence in request.sequences)
    for sequence in request.sequences:
        if constraint is not None and sequence.matcher is not None and sequence.matcher.error:
            path = f"decoding.constraint.{constraint.kind}"
            why = f"behind token {length}: {sequence.matcher.error}"
            return InvalidRequest([FieldViolation(path, why)])
    return EngineFailure(
        f"{request.asked.request_id}: the model's logits are not finite behind token {length}; "
        "the weights or the input drive it out of range"
    )


def nothing_allowed(request: Request) -> TokenweirError:
    """Return why a beam search has found nothing."""
    return EngineFailure(
        f"{request.asked.request_id}: beam search found no sequence that the request's constraint "
        "and bans allow; loosen them"
    )


def no_room(request: Request) -> TokenweirError:
    """Return why a request cannot go on though no other runs."""
    num_tokens = sum(len(one.tokens) for one in request.sequences if not one.is_finished)
    return EngineFailure(
        f"{request.asked.request_id}: the cache has no room for its {num_tokens} tokens and the "
        "next, even if nothing else runs; ask for fewer tokens or sequences"
    )
