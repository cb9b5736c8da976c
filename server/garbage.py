"""The collector of garbage in a process that serves."""

from __future__ import annotations

import gc


def keep_what_is_there() -> None:
    """Let the collector pass over all that has been made so far: a server keeps it to its end.

    Modules and models are hundreds of thousands of objects. To look at all of them again and again
    was a sixth of what a gateway does, and stopped its streams for as long as it took.
    """
    gc.collect()
    gc.freeze()
