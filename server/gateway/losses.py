"""Remembers which workers a request has lost: a repeated request has the same bytes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

_KEPT = 60.0  # seconds after the last loss; a client has given up asking by then
HasCrashed = Callable[[str], bool | None]  # by the address of a worker; None: see `Loss`
_MAX_SHARED = 7  # calls; where more are lost together, each of them is unlikely to be the cause


@dataclass(eq=False)
class Loss:
    """The end of a worker for the calls that it had at once.

    It counts against them if they are few and the worker crashed. A crash is known by the worker's
    own words (its engine failed or hung), or by what the process has written to its standard error:
    Ray enables faulthandler, which writes there at SIGSEGV, SIGABRT, SIGBUS, SIGFPE and SIGILL, and
    so when onnxruntime faults or aborts. SIGKILL leaves nothing there: it comes from outside, from
    an operator, a node that is drained, or a gateway that has found the worker to hang. Ray itself
    tells a crash and SIGKILL alike ("connection error code 2, end of file"). An end that nobody can
    tell counts as a crash, or a request might end workers forever: on another machine, or where the
    kernel has killed something for want of memory, which may be the request's.
    """

    num_calls: int = 0  # at the worker when it was lost, with those of other gateways
    crashed: bool | None = None  # None: nobody can tell

    @property
    def counts(self) -> bool:
        """Whether the request may have been the cause."""
        return self.num_calls <= _MAX_SHARED and self.crashed is not False


class Losses:
    """Workers lost, by request. Nothing is hashed as long as none is lost."""

    def __init__(
        self,
        has_crashed: HasCrashed = lambda address: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask `has_crashed` how the process of a worker has ended."""
        self._has_crashed = has_crashed
        self._clock = clock
        self._by_request: dict[bytes, set[Loss]] = {}
        self._times: dict[bytes, float] = {}  # the last loss of each, the oldest first
        self._ahead: WeakValueDictionary[str, Loss] = WeakValueDictionary()  # kept by calls

    def ahead(self, address: str) -> Loss:
        """Return what the calls at a worker meet if it is lost: one object for all of them."""
        loss = self._ahead.get(address)
        if loss is None:
            self._ahead[address] = loss = Loss()
        return loss

    @property
    def has_any(self) -> bool:
        """Whether a worker was lost of late."""
        self._forget_old()
        return bool(self._by_request)

    def of(self, request: bytes) -> set[Loss]:
        """Return the losses that the request has met of late."""
        self._forget_old()
        return set(self._by_request.get(_digest(request), ())) if self._by_request else set()

    def note(self, request: bytes, loss: Loss, address: str, num_calls: int) -> None:
        """Note that a call with this request has just lost a worker, with `num_calls` in all.

        Equal requests that are lost together count once, for they have lost one worker.
        """
        self._forget_old()
        if self._ahead.get(address) is loss:  # the first to come back
            del self._ahead[address]
            loss.num_calls, loss.crashed = num_calls, self._has_crashed(address)
        digest = _digest(request)
        self._by_request.setdefault(digest, set()).add(loss)
        self._times.pop(digest, None)
        self._times[digest] = self._clock()

    def _forget_old(self) -> None:
        while self._times:
            oldest = next(iter(self._times))
            if self._clock() - self._times[oldest] <= _KEPT:
                return
            del self._times[oldest], self._by_request[oldest]


def _digest(request: bytes) -> bytes:
    return hashlib.sha256(request).digest()
