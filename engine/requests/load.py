"""How busy an engine is, and what it has computed in vain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WastedWork:
    """Tokens computed that are in no answer, since the engine was started."""

    padding_tokens: int = 0  # computed for nobody
    cancelled_tokens: int = 0  # the client went away
    expired_tokens: int = 0  # the request failed at its deadline
    failed_tokens: int = 0  # the request failed otherwise
    discarded_tokens: int = 0  # beams and samples that are not returned
    preempted_tokens: int = 0  # the request had to make room, and is computed again

    def __add__(self, other: WastedWork) -> WastedWork:
        """Return both together."""
        return WastedWork(
            self.padding_tokens + other.padding_tokens,
            self.cancelled_tokens + other.cancelled_tokens,
            self.expired_tokens + other.expired_tokens,
            self.failed_tokens + other.failed_tokens,
            self.discarded_tokens + other.discarded_tokens,
            self.preempted_tokens + other.preempted_tokens,
        )


@dataclass(frozen=True)
class LoadSnapshot:
    """How busy an engine is now, for routers and autoscalers."""

    running: int  # sequences in the running batch
    waiting: int  # requests
    waiting_tokens: int  # the most that the waiting requests may come to cost
    cache_used: float  # share of the cache's room, 0 to 1
    tokens_per_second: float
    wasted: WastedWork = WastedWork()
