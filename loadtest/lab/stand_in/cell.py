"""A gateway before workers in processes of their own, which are replaced when they die or hang.

`python -m loadtest.lab.stand_in.cell PACKAGE REPLICAS PORT PORT_OF_METRICS`: the gateway and the
workers of `tokenweir serve`, with a few lines in place of Ray. A worker is there again in a second
or two, so that many can be lost in little time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from server.config import GatewayConfig
from server.gateway.gateway import Gateway
from server.settings import Metrics, Settings
from server.telemetry.metrics_page import MetricsPage

_NUM_SEQS = 16
_SILENCE = 2.0  # seconds; a worker that is there, and serves no more for so long, hangs
_START = 30.0  # seconds; so does one that is not there by then
_LOOK_PERIOD = 0.1  # seconds
_WORKER = (sys.executable, "-m", "loadtest.lab.stand_in.process", "worker", str(_NUM_SEQS))

logger = logging.getLogger(__name__)


class Cell:
    """A gateway and its workers."""

    def __init__(
        self,
        package: str,
        port: int,
        *,
        worker: Sequence[str] = _WORKER,
        start_timeout: float = _START,
    ) -> None:
        """`worker` is the command of one, which is given the package."""
        config = GatewayConfig(
            port=port, worker_keepalive_timeout=_SILENCE, max_calls_per_worker=_NUM_SEQS
        )
        self.gateway = Gateway(config)
        self._worker, self._start_timeout = (*worker, package), start_timeout
        self._addresses: set[str] = set()

    async def keep_worker(self) -> None:
        """Run one worker, and the next one when it is gone."""
        while True:
            process = await asyncio.create_subprocess_exec(
                *self._worker,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                await self._follow(process)
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        """Send a worker calls while it serves; return when it does no more, or never will."""
        assert process.stdout is not None
        address = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._start_timeout):
                address = json.loads(await process.stdout.readline() or '""')
        if address:
            await self._sync(self._addresses | {address})
            await self._until_gone(process, address)
            await self._sync(self._addresses - {address})
        logger.info("worker %s is gone", address or f"process {process.pid}")

    async def _until_gone(self, process: asyncio.subprocess.Process, address: str) -> None:
        """Return when a worker has ended, or has not served for a while."""
        served = time.monotonic()
        while process.returncode is None and time.monotonic() - served < 2 * _SILENCE:
            await asyncio.sleep(_LOOK_PERIOD)
            if any(worker.address == address for worker in self.gateway.pool.serving):
                served = time.monotonic()

    async def _sync(self, addresses: set[str]) -> None:
        self._addresses = addresses
        await self.gateway.pool.sync(sorted(addresses))


async def serve(package: str, replicas: int, port: int, page: int) -> None:
    """Serve until the standard input ends; so do the workers then, for nobody talks to them."""
    cell = Cell(package, port)
    await cell.gateway.start()
    MetricsPage(Settings(metrics=Metrics(port=page)), [cell.gateway.snapshot])
    await asyncio.gather(*(cell.keep_worker() for _ in range(replicas)))


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    threading.Thread(target=_end_with_input, daemon=True).start()
    # Not by uvloop, whose children are forks: one hangs now and then, for gRPC has threads.
    asyncio.run(serve(sys.argv[1], *map(int, sys.argv[2:])))
