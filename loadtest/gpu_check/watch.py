"""How busy the GPU is while workers of a comparison have whole requests to do."""

from __future__ import annotations

import statistics

from loadtest.gpu_check.gpu_use import GpuUse
from loadtest.lab.peers.comparison import Answered, Loop, Peer, StartPeer
from loadtest.lab.peers.worker import LoadOptions
from loadtest.lab.peers.works import Engine


class Watch:
    """Starts workers and looks at the GPU while they have whole requests to do."""

    def __init__(self, start: StartPeer) -> None:
        self._start = start
        self.seen: dict[tuple[str, int], list[float]] = {}  # by engine and number of requests

    def start(self, engine: Engine, options: LoadOptions) -> Peer:
        """Start a worker that is watched."""
        return _Watched(self._start(engine, options), engine.name, self.seen)

    def busy(self, engine: str, concurrency: int) -> float | None:
        """Return the median share of time in which the GPU computed; None: it is not known."""
        seen = self.seen.get((engine, concurrency))
        return statistics.median(seen) if seen else None


class _Watched:
    def __init__(self, peer: Peer, name: str, seen: dict[tuple[str, int], list[float]]) -> None:
        self._peer, self._name, self._seen = peer, name, seen
        self.versions = peer.versions

    def ask(self, loop: Loop) -> Answered:
        with GpuUse() as use:
            answered = self._peer.ask(loop)
        if use.busy is not None:
            self._seen.setdefault((self._name, loop.concurrency), []).append(use.busy)
        return answered

    def close(self) -> None:
        self._peer.close()
