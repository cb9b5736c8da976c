"""One process of a server: a worker on a stand-in or on a package, or the gateway in front of it.

`python -m loadtest.lab.stand_in.process worker SLOTS MODEL`, where MODEL is a package or the
seconds that a stand-in takes for a row, or `... gateway SLOTS ADDRESS`. It prints its address as
JSON, and ends when there is no more to read.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import uvloop

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.package.package import load_package
from loadtest.lab.stand_in.model import NAME, stand_in_engine
from server.config import GatewayConfig, WorkerConfig
from server.process import keep_what_is_there, prepare_to_relay, switch_threads_often
from server.worker.engines import Engine


async def serve_worker(num_slots: int, model: str) -> None:
    """Run a worker."""
    from server.worker.worker import Worker

    switch_threads_often()
    with tempfile.TemporaryDirectory() as directory:
        worker = Worker({NAME: _engine(num_slots, model, Path(directory))}, WorkerConfig())
        await _tell(await worker.start())
        await worker.drain(0)


def _engine(num_slots: int, model: str, directory: Path) -> Engine:
    if Path(model).is_dir():
        return load_engine(load_package(model), EngineConfig(max_num_seqs=num_slots))
    return stand_in_engine(num_slots, float(model), directory)


async def serve_gateway(num_slots: int, worker: str) -> None:
    """Run a gateway in front of a worker."""
    prepare_to_relay()  # before anything imports gRPC
    from server.gateway.gateway import Gateway

    gateway = Gateway(GatewayConfig(max_calls_per_worker=num_slots))
    address = f"127.0.0.1:{await gateway.start()}"
    await gateway.pool.sync([worker])
    while not gateway.pool.num_serving:
        await asyncio.sleep(0.01)
    await _tell(address)
    await gateway.close()


async def _tell(address: str) -> None:
    """Announce that the process serves; return when it is to end."""
    keep_what_is_there()
    print(json.dumps(address), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    what, slots, argument = sys.argv[1:]
    serve = {"worker": serve_worker, "gateway": serve_gateway}[what]
    uvloop.run(serve(int(slots), argument))
