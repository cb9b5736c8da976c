"""How much of a server each tenant uses, and when it may have more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from engine.errors import TenantQuota
from server.auth.tokens import Identity

_LEAST_RETRY = 0.05  # seconds
_NEW = 0.2  # the weight of the last call in what is expected of the next
_GUESS = 64.0  # tokens of a tenant's call, before it has had one
_GUESS_SECONDS = 1.0  # length of such a call
_SAMPLE = 64  # open requests: under a flood many more would cost too much to look at


class Quotas:
    """Counts the open calls and the tokens of tenants; any thread may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}

    def acquire(self, identity: Identity) -> Lease:
        """Count a call until `release`; TenantQuota, with when to come back, if it is one too many.

        As many tokens as its calls took of late are taken at once.
        """
        if identity.max_requests is None and identity.tokens_per_minute is None:
            return Lease(identity, 0.0, 0.0)
        with self._lock:
            tenant = self._tenants.setdefault(identity.tenant, _Tenant())
            return tenant.acquire(identity, self._clock())

    def release(self, lease: Lease, num_tokens: int | None) -> None:
        """Count a call as ended, which took so many tokens; None: as many as was expected."""
        if lease.identity.max_requests is None and lease.identity.tokens_per_minute is None:
            return
        with self._lock:
            self._tenants[lease.identity.tenant].release(lease, num_tokens, self._clock())


@dataclass(eq=False, slots=True)
class Lease:
    """A call that counts against the quota of its tenant."""

    identity: Identity
    reserved: float  # tokens that are expected of it
    since: float  # seconds, by the clock


class _Tenant:
    """The usage of one tenant."""

    def __init__(self) -> None:
        self._open: set[Lease] = set()
        self._seconds: float | None = None  # moving average of a call
        self._tokens: float | None = None  # moving average of a call
        self._used = 0.0  # tokens, of which the quota of a minute forgives so many in a minute
        self._updated = 0.0

    def acquire(self, identity: Identity, now: float) -> Lease:
        self._check_requests(identity, now)
        self._check_tokens(identity, now)
        expected = _GUESS if self._tokens is None else self._tokens
        self._used += expected
        lease = Lease(identity, expected, now)
        self._open.add(lease)
        return lease

    def release(self, lease: Lease, num_tokens: int | None, now: float) -> None:
        self._open.remove(lease)
        self._seconds = _blend(self._seconds, now - lease.since)
        if num_tokens is not None:
            self._used = max(0.0, self._used + num_tokens - lease.reserved)
            self._tokens = _blend(self._tokens, num_tokens)

    def _check_requests(self, identity: Identity, now: float) -> None:
        most = identity.max_requests
        if most is None or len(self._open) < most:
            return
        retry_after = max(_LEAST_RETRY, self._until_one_ends(now))
        raise TenantQuota(
            f"tenant {identity.tenant} has {len(self._open)} requests open, the most that it may "
            f"(max_requests); one ends in about {retry_after:.2f} s",
            retry_after,
            tenant=identity.tenant,
            quota=f"max_requests: {most}",
        )

    def _until_one_ends(self, now: float) -> float:
        """Return how long that takes, about; of many open requests a sample tells it.

        One is taken to be as long as those of late were, or as it has been open, if that is longer.
        """
        usual = _GUESS_SECONDS if self._seconds is None else self._seconds
        sample = list(islice(self._open, _SAMPLE))
        lengths = (max(usual, now - lease.since, _LEAST_RETRY) for lease in sample)
        return len(sample) / len(self._open) / sum(1 / length for length in lengths)

    def _check_tokens(self, identity: Identity, now: float) -> None:
        most = identity.tokens_per_minute
        if most is None:
            return
        per_second = most / 60
        self._used = max(0.0, self._used - (now - self._updated) * per_second)
        self._updated = now
        if self._used <= most:
            return
        retry_after = max(_LEAST_RETRY, (self._used - most) / per_second)
        raise TenantQuota(
            f"tenant {identity.tenant} has used the {most:,} tokens of a minute "
            f"(tokens_per_minute); retry in {retry_after:.1f} s",
            retry_after,
            tenant=identity.tenant,
            quota=f"tokens_per_minute: {most}",
        )


def _blend(before: float | None, now: float) -> float:
    return now if before is None else before + _NEW * (now - before)
