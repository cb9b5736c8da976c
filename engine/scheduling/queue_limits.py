"""Refuses requests when the queue is full, and says when there will be room."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import QueueFull, TokenBudgetFull
from engine.metrics import DecayingRate
from engine.scheduling.sequence import Request
from engine.scheduling.waiting_queue import WaitingQueue

_RETRY_AFTER = (0.1, 30.0)  # seconds, least and most
_UNKNOWN_RETRY_AFTER = 1.0  # before anything was admitted


class QueueLimits:
    """Counts what was refused and admitted: each refused one is told to come back in its turn."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._admission_rate = DecayingRate(window=30.0)
        self._admitted_tokens_rate = DecayingRate(window=30.0)
        self.forget()

    def forget(self) -> None:
        """Take back every refusal: the queue is empty."""
        self._refused = 0  # requests, and their tokens, since there was room
        self._refused_tokens = 0

    def admitted(self, request: Request, now: float) -> None:
        """Count a request that left the queue to run."""
        self._admission_rate.add(1, now)
        self._admitted_tokens_rate.add(request.max_cost, now)
        self._refused = max(0, self._refused - 1)
        self._refused_tokens = max(0, self._refused_tokens - request.max_cost)

    def check(self, waiting: WaitingQueue, request: Request, now: float) -> None:
        """Raise QueueFull or TokenBudgetFull if the request may not wait."""
        asked, config, num_tokens = request.asked, self._config, request.max_cost
        if len(waiting) >= config.max_queue_size:
            self._refused += 1
            wait = _bounded(self._refused, self._admission_rate.at(now))
            raise QueueFull(
                f"{asked.request_id}: {len(waiting)} requests are waiting, at most "
                f"{config.max_queue_size} may; retry in {wait:.1f} s",
                wait,
            )
        excess = waiting.num_tokens + num_tokens - config.max_waiting_tokens
        if waiting and excess > 0:  # one alone may be larger than the limit
            needed = excess + self._refused_tokens
            self._refused_tokens += num_tokens
            wait = _bounded(needed, self._admitted_tokens_rate.at(now))
            raise TokenBudgetFull(
                f"{asked.request_id}: the waiting requests may come to "
                f"{waiting.num_tokens} tokens, with the {num_tokens} of this one more than "
                f"{config.max_waiting_tokens}; retry in {wait:.1f} s, or ask for fewer tokens "
                "(stopping.max_new_tokens)",
                wait,
            )


def _bounded(count: float, rate: float) -> float:
    """Return the seconds until `count` more have been admitted, each refused one in its turn."""
    if rate == 0:
        return _UNKNOWN_RETRY_AFTER
    return min(max(count / rate, _RETRY_AFTER[0]), _RETRY_AFTER[1])
