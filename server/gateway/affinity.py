"""Prefix affinity: the worker that last read the beginning of a prompt may still have it cached."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from google.protobuf.message import DecodeError

from server.api import GENERATION
from server.gateway.backend import Backend
from server.gateway.views_pb2 import GeneratePrompts, Prompt, ScorePrompts, StreamPrompts

_NEAR = 4  # calls that a worker may have more than the least busy one
_MAX_PREFIXES = 16_384  # most that are remembered
_BLOCK = 256  # characters of a text, or a quarter of it of tokens; shorter prompts are left alone

_VIEWS: Mapping[str, type[GeneratePrompts] | type[ScorePrompts] | type[StreamPrompts]] = {
    f"/{GENERATION}/Generate": GeneratePrompts,
    f"/{GENERATION}/GenerateStream": StreamPrompts,
    f"/{GENERATION}/Score": ScorePrompts,
}


class Affinity:
    """Chooses the worker that had the same beginning, while no other has much less to do."""

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, str] = OrderedDict()  # worker by prefix, the oldest first

    def choose(self, prefix: bytes | None, workers: Sequence[Backend]) -> Backend:
        """Return the worker for a prompt, by what `prefix_of` says of it; remember the choice."""
        chosen = least_loaded(workers)
        if prefix is None:
            return chosen
        last = self._last.pop(prefix, None)
        for worker in workers:
            if worker.address == last and worker.load <= chosen.load + _NEAR:
                chosen = worker
        self._last[prefix] = chosen.address
        if len(self._last) > _MAX_PREFIXES:
            self._last.popitem(last=False)
        return chosen


def least_loaded(workers: Sequence[Backend]) -> Backend:
    """Return the one with the fewest calls, any of those that have as few."""
    return min(workers, key=lambda worker: (worker.load, random.random()))


def prefix_of(method: str, request: bytes) -> bytes | None:
    """Return a digest of the first block of a call's first prompt, with its model and tenant.

    Caches of one tenant are not used for another. None if it has no such prompt, or a shorter one.
    """
    if (view := _VIEWS.get(method)) is None:
        return None
    try:
        found = view.FromString(request)
    except DecodeError:
        return None
    if isinstance(found, StreamPrompts):
        found = found.request
    block = _first_block(found.inputs[0]) if found.inputs else None
    if block is None:
        return None
    return hashlib.sha256(repr((found.model, found.scheduling.tenant, block)).encode()).digest()


def _first_block(prompt: Prompt) -> str | list[int] | None:
    block: str | list[int]
    if prompt.tokens.ids:
        block = list(prompt.tokens.ids[: _BLOCK // 4])
        return block if len(block) == _BLOCK // 4 else None
    said = ("\n".join(one.parts) or one.content for one in prompt.chat.messages)
    text = prompt.text or "\n".join(said)
    return text[:_BLOCK] if len(text) >= _BLOCK else None
