"""Lines of the log for calls that fail at the gateway; a worker has one for every call it had."""

from __future__ import annotations

import logging
import threading

from engine.errors import ReplicaLost, ReplicasLost, Starting
from server.log_budget import LogBudget
from server.logs import REQUESTS, with_fields
from server.status import CallStatus

_OF_NO_WORKER = frozenset({ReplicaLost.reason, ReplicasLost.reason, Starting.reason})
_MAX_CHARS = 200
logger = logging.getLogger(REQUESTS)


class FailedCalls:
    """Writes them, so many a second at most: refusals come by the thousand."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._budget = LogBudget()

    def note(self, method: str, request_id: str, tenant: str, status: CallStatus) -> None:
        """Note a call that the gateway has ended itself; from any thread."""
        if not logger.isEnabledFor(logging.INFO):
            return
        with self._lock:
            left_out, is_taken = self._budget.left_out, self._budget.take()
        if not is_taken:
            return
        if left_out:
            logger.info("(%s lines like the next are left out)", f"{left_out:,}")
        fields = with_fields(
            request_id=request_id,
            method=method.rpartition("/")[2],
            tenant=tenant[:_MAX_CHARS],
            status=status.code.name,
            reason=status.reason,
            error=status.message[:_MAX_CHARS],
        )
        logger.info("request", extra=fields)


def is_of_no_worker(status: CallStatus) -> bool:
    """Return whether a call has failed for want of a worker: no worker can have logged it."""
    return status.reason in _OF_NO_WORKER
