"""Makes Ray's blocking calls, and gives each of them an end: Ray may be lost, or hang."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar, TypeVarTuple, Unpack

from engine.errors import EngineFailure

PATIENCE = 20.0  # seconds for a call that is to end, or to begin no more
WATCH_PERIOD = 1.0  # seconds between two looks at Ray's servers
_CONNECT_TIMEOUT = 3.0  # seconds
_OWN_LACK = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # no sign of a server's end
_MAX_TIMEOUTS = 2  # in a row; a server that refuses is lost at once
logger = logging.getLogger(__name__)
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class RayLost(EngineFailure):
    """Ray is gone or hangs, and its threads in this process would keep the interpreter."""


class RayThread:
    """Makes Ray's calls, one after the other, in a thread that lives as long as Ray.

    In the main thread ray.init would replace the handler of SIGTERM. In several threads Ray could
    be shut down while another call is in it, and its processes die with the thread that started
    them. Made where an event loop runs. Its end raises RayLost if Ray is lost or hangs.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def lose(self, reason: str) -> None:
        """Make no more calls, and give up the one that is being made."""
        if not self._loss.done():
            logger.error("%s; what runs gets time to end, then the command ends", reason)
            self._loss.set_result(reason)

    async def wait_until_lost(self) -> None:
        """Raise RayLost as soon as Ray is lost."""
        raise RayLost(await asyncio.shield(self._loss))

    async def run(self, function: Callable[[Unpack[Arguments]], T], *args: *Arguments) -> T:
        """Call the function; if cancelled, wait for its end before raising.

        Raises RayLost if Ray is lost before the function returns.
        """
        future = self._submit(function, *args)
        try:
            await self._wait(future, None)
        except asyncio.CancelledError:
            await self._wait(future, self._patience)
            if future.done():
                future.exception()  # seen: the cancellation says more
            raise
        if not future.done():
            raise RayLost(self._loss.result())
        return future.result()

    async def finish(self, function: Callable[[Unpack[Arguments]], T], *args: *Arguments) -> None:
        """Call a function that ends something, unless Ray is lost."""
        if not self._loss.done():
            future = self._submit(function, *args)
            await self._wait(future, self._patience)
            if future.done():
                future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._executor.shutdown(wait=not self._loss.done(), cancel_futures=True)
        if self._loss.done() and not (kind and issubclass(kind, RayLost)):
            raise RayLost(self._loss.result())

    def _submit(
        self, function: Callable[[Unpack[Arguments]], T], *args: *Arguments
    ) -> asyncio.Future[T]:
        if self._loss.done():
            raise RayLost(self._loss.result())
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def _wait(self, future: asyncio.Future[T], limit: float | None) -> None:
        """Return when the call has ended or Ray is lost, which it is after the limit."""
        either: set[asyncio.Future[Any]] = {future, self._loss}
        await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if limit is not None and not future.done():
            self.lose(f"Ray has not answered for {limit:g} s")


async def watch(
    servers: Mapping[str, tuple[str, int]],
    lost: Callable[[str], None],
    period: float = WATCH_PERIOD,
) -> None:
    """Call `lost` with a reason, and return, as soon as a server takes no connections.

    The servers are given by name: host and port.
    """
    timeouts = dict.fromkeys(servers, 0)
    while True:
        for name, (host, port) in servers.items():
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT):
                    _, writer = await asyncio.open_connection(host, port)
                timeouts[name] = 0
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            except TimeoutError:
                timeouts[name] += 1
                if timeouts[name] == _MAX_TIMEOUTS:
                    return lost(f"Ray's {name} at {host}:{port} does not answer")
            except OSError as error:
                if error.errno not in _OWN_LACK:
                    return lost(f"Ray's {name} at {host}:{port} is gone")
        await asyncio.sleep(period)
