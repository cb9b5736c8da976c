"""What a request may cost before it runs: the estimates that admission is decided by."""

from __future__ import annotations

from engine.package import GenerationContract
from engine.sequence import Request


def max_cost(request: Request, contract: GenerationContract) -> int:
    """Return the most tokens that a request may come to compute.

    Its source or prompt once, and for every sequence as many new tokens as it allows, or as the
    context has room for. An end-of-sequence that comes earlier cannot be foreseen.
    """
    source, num_given = request.source, request.leader.num_prompt
    room = max(0, contract.cache.max_len - num_given)
    wanted = source.params.max_new_tokens
    num_new = room if wanted is None else min(wanted, room)
    num_read = len(source.prompt_ids) + (num_given if contract.cross_cache else 0)
    return num_read + len(request.sequences) * num_new
