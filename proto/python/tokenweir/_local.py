"""Use of a package without a server: the same client, of a worker in this process."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

from tokenweir.client import Client

_WORKERS = "tokenweir.workers"  # entry points of what is installed: they run a package


class _Worker(Protocol):
    address: str

    def close(self) -> None: ...


class LocalClient(Client):
    """Calls a model that runs in this process, and ends it when it is closed."""

    def __init__(self, worker: _Worker, timeout: float | None) -> None:
        super().__init__(worker.address, timeout=timeout, max_attempts=1)
        self._worker = worker

    def close(self) -> None:
        """Close the channel, end what runs, and give back what the model takes."""
        super().close()
        self._worker.close()


def load(
    package: str | os.PathLike[str],
    *,
    name: str | None = None,
    timeout: float | None = 60.0,
    **settings: Any,
) -> LocalClient:
    """Load a model into this process, and return its client.

        with tokenweir.load("packages/dates") as client:
            print(client.generate("dates", "3rd of Feb, 1998").text)

    `package` is what `tokenweir export` wrote. It may also be a checkpoint, a directory of Hugging
    Face or "ORG/NAME@REVISION" of its Hub: the package is built first, and kept for the next time.
    `name` is what the model is called by, by default the package's own; `timeout` is that of
    Client; `settings` are those of engine.config.EngineConfig, as num_threads=2, max_num_seqs=8 or
    device="cuda". It needs the extra cpu or gpu, and raises ImportError without; other errors are
    those of engine.errors, as PackageError.
    """
    found = next(iter(entry_points(group=_WORKERS)), None)
    if found is None:
        raise ImportError(
            "this installation of tokenweir names nothing that runs a model in this process; "
            "install it again"
        )
    try:
        worker = cast(_Worker, found.load()(os.fspath(package), name, settings))
    except ModuleNotFoundError as error:
        raise ImportError(
            f"tokenweir.load runs the model in this process and needs {error.name}; install it "
            "with: pip install 'tokenweir[cpu]', or for a GPU 'tokenweir[gpu]'"
        ) from error
    return LocalClient(worker, timeout)
