"""When an engine must end a call: a little before the client does."""

from __future__ import annotations

import time

from server.local_services import Context

# Ending a call this much before its client does lets the answer say where the time went.
_DEADLINE_MARGIN_SHARE = 0.1
_MAX_DEADLINE_MARGIN = 0.05  # seconds


def engine_deadline(context: Context) -> float | None:
    """Return when the engine must end the call, on the monotonic clock; None: never."""
    remaining: float | None = context.time_remaining()  # the stubs know no call without one
    if remaining is None:
        return None
    margin = min(_MAX_DEADLINE_MARGIN, remaining * _DEADLINE_MARGIN_SHARE)
    return time.monotonic() + remaining - margin
