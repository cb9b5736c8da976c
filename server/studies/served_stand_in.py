"""One process of a server on a stand-in: its worker, or the gateway before that.

`python -m server.studies.served_stand_in worker 256 gpu`, or `... gateway 256 ADDRESS`; `worker
16 PACKAGE` serves a package under the same name, `gateway 256 ADDRESS FOLDER` has the doors of
stand_in_doors. It prints its address, then a line of JSON for each that it reads: the stand-in's
full steps. It ends when there is no more to read.
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
from loadtest.studies.stand_in import (
    NAME,
    FullSteps,
    StandInModel,
    stand_in_config,
    stand_in_engine,
    step_time,
)
from server.config import GatewayConfig, WorkerConfig
from server.garbage import keep_what_is_there
from server.identity.config import DoorsConfig
from server.worker.engines import Engine

# The gateway tells gRPC how to listen when it is imported, before all else that imports gRPC. A
# worker has a process without that.


async def serve_worker(num_slots: int, model: str) -> None:
    """Run a worker on a package, or on a model that takes the time of `step_time`."""
    if (package := Path(model)).is_dir():
        config = EngineConfig(max_num_seqs=num_slots)
        await _serve(load_engine(load_package(package), config), None)
        return
    stand_in = StandInModel(num_slots, step_time(model))
    with tempfile.TemporaryDirectory() as directory:
        engine = stand_in_engine(stand_in_config(num_slots), stand_in, Path(directory))
        await _serve(engine, stand_in)


async def serve_gateway(num_slots: int, worker: str, folder: str = "") -> None:
    """Run a gateway before a worker, with doors if there is a folder of theirs."""
    from server.gateway.gateway import Gateway
    from server.studies.stand_in_doors import make_doors

    doors = make_doors(Path(folder)) if folder else DoorsConfig()
    gateway = Gateway(GatewayConfig(max_calls_per_worker=num_slots, doors=doors))
    address = f"127.0.0.1:{await gateway.start()}"
    await gateway.sync([worker])
    while not gateway.num_serving:
        await asyncio.sleep(0.01)
    await _tell(address, None)
    await gateway.close()


async def _serve(engine: Engine, stand_in: StandInModel | None) -> None:
    from server.worker.worker import Worker

    worker = Worker({NAME: engine}, WorkerConfig())
    await _tell(await worker.start(), stand_in)
    await worker.drain(0)


async def _tell(address: str, model: StandInModel | None) -> None:
    keep_what_is_there()
    print(address, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(model.take_full_steps() if model else FullSteps()), flush=True)


if __name__ == "__main__":
    what, slots, *arguments = sys.argv[1:]
    serve = serve_worker if what == "worker" else serve_gateway
    uvloop.run(serve(int(slots), *arguments))
