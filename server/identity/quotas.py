"""How much of a server each tenant uses, and when it may have more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from engine.errors import TenantQuota
from server.identity.tokens import Identity

_LEAST_RETRY = 0.05  # seconds
_NEW = 0.2  # the weight of the last call in what is expected of the next
_GUESS = 64.0  # tokens of a tenant's call, before it has had one


class Quotas:
    """Counts the open calls and the tokens of tenants; any thread may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}

    def enter(self, identity: Identity) -> Visit:
        """Count a call until `leave`; TenantQuota, with when to come back, if it is one too many.

        Of the tokens, what its calls took of late is taken at once.
        """
        if identity.max_requests is None and identity.tokens_per_minute is None:
            return Visit(identity, 0.0, 0.0)
        with self._lock:
            tenant = self._tenants.setdefault(identity.tenant, _Tenant())
            return tenant.enter(identity, self._clock())

    def leave(self, visit: Visit, num_tokens: int | None) -> None:
        """Count a call as ended, which took so many tokens; None: as many as was expected."""
        if visit.identity.max_requests is None and visit.identity.tokens_per_minute is None:
            return
        with self._lock:
            self._tenants[visit.identity.tenant].leave(visit, num_tokens, self._clock())


class Visit:
    """A call that was let in."""

    __slots__ = ("identity", "reserved", "since")

    def __init__(self, identity: Identity, reserved: float, since: float) -> None:
        self.identity = identity
        self.reserved = reserved  # tokens that are expected of it
        self.since = since  # seconds, by the clock


class _Tenant:
    """What one tenant has taken."""

    def __init__(self) -> None:
        self._num_open = 0
        self._seconds: float | None = None  # that a call takes
        self._tokens: float | None = None  # that a call takes
        self._used = 0.0  # tokens, of which the quota of a minute forgives so many in a minute
        self._updated = 0.0

    def enter(self, identity: Identity, now: float) -> Visit:
        self._check_requests(identity)
        self._check_tokens(identity, now)
        self._num_open += 1
        expected = _GUESS if self._tokens is None else self._tokens
        self._used += expected
        return Visit(identity, expected, now)

    def leave(self, visit: Visit, num_tokens: int | None, now: float) -> None:
        self._num_open -= 1
        self._seconds = _blend(self._seconds, now - visit.since)
        if num_tokens is not None:
            self._used = max(0.0, self._used + num_tokens - visit.reserved)
            self._tokens = _blend(self._tokens, num_tokens)

    def _check_requests(self, identity: Identity) -> None:
        most = identity.max_requests
        if most is None or self._num_open < most:
            return
        retry_after = max(_LEAST_RETRY, (self._seconds or 0.0) / most)  # one of them ends so often
        raise TenantQuota(
            f"tenant {identity.tenant} has {self._num_open} requests open, the most that it may "
            f"(max_requests); one ends in about {retry_after:.2f} s",
            retry_after,
            tenant=identity.tenant,
            quota=f"max_requests: {most}",
        )

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
