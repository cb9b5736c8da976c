"""A worker in the process that calls it: the other end of `tokenweir.load`.

It is the worker that `tokenweir serve` runs, on an event loop in a thread, behind a socket in a
directory that only this user can enter: the same calls, messages, limits and errors as of a server.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.package.package import load_package
from server.config import WorkerConfig
from server.listening import socket_directory
from server.packages.build import BuildOptions, build_package
from server.settings import MOST_REQUEST_BYTES
from server.worker.engines import Engine
from server.worker.worker import Worker

T = TypeVar("T")


def load(path: str | Path, name: str | None, settings: Mapping[str, Any]) -> InProcessWorker:
    """Load a package, start its engine, return when it serves; the caller closes it.

    `name` is that of the model, by default the package's; `settings` are those of EngineConfig,
    but that on a GPU there are as many rows as were verified, unless a number is given.
    Raises what `load_engine` and `Worker.start` raise.
    """
    package = load_package(build_package(path, BuildOptions(device=settings.get("device"))))
    num_seqs = max(settings.get("decode_buckets", ()), default=0)
    config = EngineConfig(**{"max_num_seqs": num_seqs, **settings})
    return InProcessWorker({name or package.manifest.name: load_engine(package, config)}, config)


class InProcessWorker:
    """A worker with a thread of its own, from `__init__` to `close`, or to the process's end."""

    def __init__(self, models: Mapping[str, Engine], config: EngineConfig) -> None:
        self._directory = tempfile.mkdtemp(prefix="tokenweir-", dir=socket_directory())
        socket = f"unix:{self._directory}/socket"
        limits = {**vars(config.limits), "max_request_bytes": MOST_REQUEST_BYTES}
        settings = WorkerConfig(**limits, host=socket)
        self._worker: Worker | None = Worker(models, settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tokenweir worker", daemon=True
        )
        self._thread.start()
        try:
            self.address = self._run(self._worker.start())
        except BaseException:
            self._end()
            raise
        # Not by atexit, which comes when no thread may be asked to do anything any more; C++ aborts
        # if Python ends a thread inside it.
        threading._register_atexit(self.close)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End what runs, and the engine; nothing the second time."""
        worker, self._worker = self._worker, None  # this object is kept until the process ends
        if worker is not None:
            self._run(worker.drain(0))
            self._end()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._directory)
