"""The trace that a call belongs to, as W3C Trace Context has it in the metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable

TRACEPARENT = "traceparent"
_IDS = r"-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_FORM = re.compile(rf"00{_IDS}|(?!00|ff)[0-9a-f]{{2}}{_IDS}(-.*)?")  # later versions may have more


def traceparent_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the `traceparent` of a call; "" without a good one."""
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str) and _FORM.fullmatch(value):
            return value
    return ""


def trace_id_in(traceparent: str) -> str:
    """Return the id of the trace, 32 hexadecimal digits; "" of none."""
    return traceparent[3:35]
