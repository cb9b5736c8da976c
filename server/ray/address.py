"""Whether a Ray of our own is run, or a cluster is joined."""

from __future__ import annotations

import os


def joins_cluster() -> bool:
    """Say whether the environment names a cluster to join."""
    return bool(os.environ.get("RAY_ADDRESS"))
