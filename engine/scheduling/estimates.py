"""Estimates for admission: the most that a request may cost, and how soon it could end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import CannotMeet
from engine.metrics import DecayingLeast, DrainMeter
from engine.scheduling.sequence import Request, TokenRequest

_LEAST_WINDOW = 600.0  # seconds: a time of high load must not pass for what the machine can do
_RETRY_MARGIN = 1.1  # margin, so that a retry is not refused again
_LEAST_RETRY = 0.1  # seconds
_LEAST_DRAINED = 8  # sequences, below which that is no measurement


def max_cost(request: Request) -> int:
    """Return the most tokens that a request may come to compute.

    Its source or prompt once, and for every sequence as many new tokens as it allows, or as the
    context has room for. An end-of-sequence that comes earlier cannot be foreseen.
    """
    num_read = len(request.asked.prompt_ids)
    num_read += request.leader.num_prompt if request.needs_encoding else 0
    return num_read + len(request.sequences) * request.stop_rule.max_new_tokens


def least_new_tokens(request: Request) -> int:
    """Return how many tokens a request surely makes before it ends as its client wants it to."""
    params, most = request.asked.params, request.stop_rule.max_new_tokens
    if params.allow_partial:
        return 1
    if params.ignore_eos and not (params.stop_strings or params.stop_token_ids):
        return max(1, most)
    return max(1, min(params.min_new_tokens, most))


@dataclass(frozen=True)
class Refusal:
    """Why a request cannot end in time."""

    queue_wait: float  # seconds
    own_time: float  # seconds from its admission, at best
    retry_after: float | None  # None: it has too little time even with nothing waiting


def cannot_meet(
    asked: TokenRequest, refusal: Refusal, *, time_left: float, num_before: int
) -> CannotMeet:
    """Return the error of a refused request, with `num_before` sequences that go before it."""
    needs = f"{asked.request_id}: it needs at least {refusal.own_time:.3f} s"
    if refusal.retry_after is None:
        return CannotMeet(
            f"{needs} even with nothing waiting, and its deadline is in {time_left:.3f} s; "
            "allow more time, or ask for fewer tokens",
            None,
        )
    return CannotMeet(
        f"{needs} and would wait about {refusal.queue_wait:.3f} s behind {num_before} "
        f"sequences, but its deadline is in {time_left:.3f} s; retry in "
        f"{refusal.retry_after:.1f} s, or allow more time",
        refusal.retry_after,
    )


class CompletionEstimates:
    """Measures steps and the drain of the queue, and tells which deadlines cannot be met.

    A cost that was not measured counts as nothing, and every doubt is decided for the request: the
    fastest of late steps count, and a queue may drain twice as fast as it did.
    """

    def __init__(self, max_num_seqs: int, chunk_size: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._chunk_size = chunk_size
        self._least_decode = DecayingLeast(_LEAST_WINDOW)  # seconds a step
        self._least_read = DecayingLeast(_LEAST_WINDOW)  # seconds a source or prompt token
        self._last_decode = 0.0
        self._drain = DrainMeter(max(max_num_seqs, _LEAST_DRAINED))

    def took_step(self, seconds: float, now: float, *, num_decoding: int, num_read: int) -> None:
        """Measure a step of so many decoding sequences and source or prompt tokens."""
        if num_decoding == num_read == 0:
            return
        if num_read == 0:
            self._last_decode = seconds
            self._least_decode.add(seconds, now)
            return
        reading = seconds - (self._last_decode if num_decoding else 0.0)
        # A few tokens take nearly as long as many: they tell nothing of a long prompt.
        if reading > 0 and num_read >= self._chunk_size // 2:
            self._least_read.add(reading / num_read, now)

    def queue_changed(self, now: float, *, num_admitted: int, is_waiting: bool) -> None:
        """Note how many sequences were admitted out of the queue, and if somebody still waits."""
        self._drain.advance(now, num_admitted, is_waiting)

    def refusal(
        self, *, time_left: float, num_read: int, num_new: int, num_to_end: int
    ) -> Refusal | None:
        """Return why a request cannot be done in the time left; None if it may.

        `num_to_end` sequences are to end before it has room.
        """
        own_time = num_read * (self._least_read.value or 0.0)
        own_time += (num_new - 1) * (self._least_decode.value or 0.0)
        if own_time > time_left:
            return Refusal(0.0, own_time, None)
        rate = self._drain.rate
        wait = num_to_end / rate if rate else 0.0
        if _least_share(num_to_end) * wait + own_time <= time_left:
            return None
        slack = max(0.0, time_left - self._likely_time(num_read, num_new))
        # Sequences do not end one by one: the last may come a whole turnover later.
        surely = _RETRY_MARGIN * (num_to_end + self._max_num_seqs) / rate if rate else 0.0
        return Refusal(wait, own_time, max(_LEAST_RETRY, surely - slack))

    def _likely_time(self, num_read: int, num_new: int) -> float:
        """Return how long a request takes beside the others, of whose steps it waits for one."""
        num_steps = math.ceil(num_read / self._chunk_size) + num_new
        return num_read * (self._least_read.value or 0.0) + num_steps * self._last_decode


def _least_share(num_to_end: int) -> float:
    """Return the share of the expected time in which so many sequences may already end.

    Half of it for many; less for a few, of which all may happen to be short.
    """
    return max(0.0, min(0.5, 1 - 2 / math.sqrt(max(1, num_to_end))))
