"""One process of a server on a stand-in: its worker, or the gateway before that.

`python -m loadtest.lab.stand_in.process worker 256 gpu`, or `... gateway 256 ADDRESS`; `worker
16 PACKAGE` serves a package under the same name, `gateway 256 ADDRESS FOLDER` has the doors of
stand_in_doors, `proxy 256 ADDRESS` is a BareProxy in place of a gateway. The engine of a
`worker-process` has a process for itself. It prints its address and the number of that process,
then a line of JSON for each that it reads: the stand-in's full steps. It ends when there is no more
to read.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.package.package import load_package
from loadtest.lab.stand_in.model import (
    NAME,
    FullSteps,
    StandInEngine,
    stand_in_engine,
)
from server.config import GatewayConfig, WorkerConfig
from server.garbage import keep_what_is_there
from server.identity.config import DoorsConfig
from server.worker.engines import Engine

# The gateway tells gRPC how to listen when it is imported, before all else that imports gRPC. A
# worker has a process without that.


async def serve_worker(num_slots: int, model: str, *, own_process: bool = False) -> None:
    """Run a worker on a package, or on a model that takes the time of `step_time`."""
    if (package := Path(model)).is_dir():
        config = EngineConfig(max_num_seqs=num_slots, own_process=own_process)
        await _serve(load_engine(load_package(package), config), None)
        return
    with tempfile.TemporaryDirectory() as directory:
        made = stand_in_engine(num_slots, model, Path(directory), own_process=own_process)
        await _serve(made.engine, made)


async def serve_gateway(num_slots: int, worker: str, folder: str = "") -> None:
    """Run a gateway before a worker, with doors if there is a folder of theirs."""
    from loadtest.lab.stand_in.doors import make_doors
    from server.gateway.gateway import Gateway

    doors = make_doors(Path(folder)) if folder else DoorsConfig()
    gateway = Gateway(GatewayConfig(max_calls_per_worker=num_slots, doors=doors))
    address = f"127.0.0.1:{await gateway.start()}"
    await gateway.sync([worker])
    while not gateway.num_serving:
        await asyncio.sleep(0.01)
    await _tell(address, None)
    await gateway.close()


async def serve_proxy(_num_slots: int, worker: str) -> None:
    """Run what does nothing but hand calls on."""
    from grpc import aio

    from loadtest.lab.stand_in.bare_proxy import BareProxy

    async with aio.insecure_channel(worker) as channel:
        server = aio.server()
        server.add_generic_rpc_handlers((BareProxy(channel),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        await _tell(address, None)
        await server.stop(None)


async def _serve(engine: Engine, made: StandInEngine | None) -> None:
    from server.worker.worker import Worker

    worker = Worker({NAME: engine}, WorkerConfig())
    await _tell(await worker.start(), made)
    await worker.drain(0)


async def _tell(address: str, made: StandInEngine | None) -> None:
    keep_what_is_there()
    print(address, (made and made.pid) or "", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(made.log.take() if made else FullSteps()), flush=True)


if __name__ == "__main__":
    what, slots, *arguments = sys.argv[1:]
    serve: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
        "worker": serve_worker,
        "worker-process": partial(serve_worker, own_process=True),
        "gateway": serve_gateway,
        "proxy": serve_proxy,
    }
    uvloop.run(serve[what](int(slots), *arguments))
