"""How many workers have taken the place of one that died or hung."""

from __future__ import annotations


class Restarts:
    """Told of workers, by the ids of their replicas."""

    def __init__(self) -> None:
        self.count = 0
        self._lost: dict[str, None] = {}
        self._known: set[str] = set()

    def joined(self, replica_id: str) -> None:
        """Note that a worker serves; one whose connection broke may come back itself."""
        if replica_id in self._known:
            self._lost.pop(replica_id, None)
            return
        self._known.add(replica_id)
        if self._lost:
            del self._lost[next(iter(self._lost))]
            self.count += 1

    def lost(self, replica_id: str) -> None:
        """Note that a worker is gone that was not told to go."""
        self._lost[replica_id] = None
