"""The seam under the scheduler: the room of sequences for keys and values, and slot mappings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from engine.scheduling.sequence import Request, Sequence
from engine.scheduling.step import Parts, SlotMapping


class KVCache(Protocol):
    """Gives room to sequences; what lies where is known to it alone.

    It has no memory of its own: what is to be done there comes with the next slot mapping.
    """

    has_room_for_all: bool
    """Whether what was admitted lacks room never: then `grow` is not asked for decoding sequences,
    and `arrange` only where other sequences decode than in the step before."""

    @property
    def used(self) -> float:
        """The share that is given out, 0 to 1."""

    @property
    def has_changes(self) -> bool:
        """Whether there is something to be done in memory, though nothing is computed."""

    def num_cached(self, request: Request) -> int:
        """Return how many tokens of a request need not be computed, as things are now."""

    def admit(self, request: Request) -> int | None:
        """Take a request in with all its unfinished sequences; None: there is no room now.

        Returns how many tokens need not be computed: of the source, else the first of those that
        `reading` gives.
        """

    def share(self, request: Request) -> None:
        """Let others use what a request has computed: its first token shows that it is sound."""

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for so many tokens behind those that are computed; False: there is none now."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence of the same request go on from another; what the child had is gone."""

    def drop(self, sequence: Sequence) -> None:
        """Take away what a sequence has computed; it stays, and may be forked into."""

    def release(self, sequence: Sequence, *, sound: bool) -> None:
        """Let a sequence go; with the last one of its request, the request's source.

        `sound`: it has ended as it should, so that others may use what it has computed.
        """

    def arrange(self, decoding: list[Sequence]) -> list[Sequence]:
        """Return the sequences that decode in this step in the order in which it suits best."""

    def slot_mapping(self, parts: Parts) -> SlotMapping:
        """Return where a step finds and puts what it computes, for the runner of this cache."""

    def problems(self, requests: Iterable[Request]) -> list[str]:
        """Return what does not fit together, if these requests are those that were admitted."""

    def snapshot(self) -> object:
        """Return what memory holds when no step is under way, as the runner's `contents` does."""

    def clear(self) -> None:
        """Let everything go, and forget what was to be done: the memory was emptied."""
