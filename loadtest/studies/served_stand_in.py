"""One process of a server on a stand-in: its worker, or the gateway before that.

`python -m loadtest.studies.served_stand_in worker 256 gpu`, or `... gateway 256 ADDRESS`. It prints
its address, then a line of JSON for each that it reads: the model's full steps. It ends when there
is no more to read.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import uvloop

from loadtest.studies.stand_in import (
    NAME,
    FullSteps,
    StandInModel,
    stand_in_config,
    stand_in_engine,
    step_time,
)
from server.config import GatewayConfig, WorkerConfig

# The gateway tells gRPC how to listen when it is imported: a worker has a process without that.


async def serve_worker(num_slots: int, step: str) -> None:
    """Run a worker whose model takes the time of `step_time`."""
    from server.worker.worker import Worker

    model = StandInModel(num_slots, step_time(step))
    with tempfile.TemporaryDirectory() as directory:
        engine = stand_in_engine(stand_in_config(num_slots), model, Path(directory))
        worker = Worker({NAME: engine}, WorkerConfig())
        await _tell(await worker.start(), model)
        await worker.drain(0)


async def serve_gateway(num_slots: int, worker: str) -> None:
    """Run a gateway before a worker."""
    from server.gateway.gateway import Gateway

    gateway = Gateway(GatewayConfig(max_calls_per_worker=num_slots))
    address = f"127.0.0.1:{await gateway.start()}"
    await gateway.sync([worker])
    while not gateway.num_serving:
        await asyncio.sleep(0.01)
    await _tell(address, None)
    await gateway.close()


async def _tell(address: str, model: StandInModel | None) -> None:
    print(address, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(model.take_full_steps() if model else FullSteps()), flush=True)


if __name__ == "__main__":
    what, slots, argument = sys.argv[1:]
    serve = serve_worker if what == "worker" else serve_gateway
    uvloop.run(serve(int(slots), argument))
