"""The HTTP server beside a gateway, in a process of its own: started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from engine.background import beside
from engine.errors import ConfigError
from server.adapters.config import HttpConfig
from server.gateway.admin.admin_port import admin_socket
from server.listening import check_ports_are_free, listen_at

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h: it ends with this process, however that ends
_PROGRAM = f"""
import ctypes, signal
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, int(signal.SIGKILL), 0, 0, 0)
from server.adapters.http.child import main
main()
"""
_COMMAND = (sys.executable, "-P", "-c", _PROGRAM)
_PAUSE = 1.0  # seconds between two attempts
_KILL_DELAY = 5.0  # seconds after its own grace


class HttpProcess:
    """Runs the HTTP server until it is told to end.

    Every process inherits the same socket, so that clients who come between two of them wait.
    """

    def __init__(self, config: HttpConfig, server: str, admin: str | None = None) -> None:
        """`server` and `admin` are where it calls the gateway, and asks for its load."""
        check_ports_are_free(("--http-port", config.host, config.port))
        self._config = config
        self._listener = listen_at(config.host, config.port)
        self._task = pickle.dumps(
            {
                "server": server,
                "admin": admin,
                "config": config,
                "listener": self._listener.fileno(),
            }
        )
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""  # while it does not serve

    @property
    def pid(self) -> int:
        """The process, once it was started."""
        assert self._process is not None, "it was started"
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it serves; ConfigError with its words if it does not."""
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,  # Ctrl-C in a terminal is for the command that started it
        )
        self._process = process
        assert process.stdin is not None and process.stdout is not None, "they are pipes"
        process.stdin.write(self._task)
        process.stdin.close()
        self.url = (await process.stdout.readline()).decode().strip()
        if not self.url:
            said = (await _stderr(process).read()).decode(errors="replace").strip()
            await process.wait()
            raise ConfigError(f"the HTTP server does not start: {said}")

    async def keep(self) -> None:
        """Log what it says, and start it again when it dies; until cancelled."""
        while True:
            assert self._process is not None, "it was started"
            async for line in _stderr(self._process):
                _log(line.decode(errors="replace").rstrip())
            code = await self._process.wait()
            logger.error("the HTTP server has ended with %d, and is started again", code)
            self.url = ""
            while not self.url:
                try:
                    await self.start()
                except ConfigError as error:
                    logger.error("%s", error)
                    await asyncio.sleep(_PAUSE)

    async def stop(self) -> None:
        """Drain its open requests, and end it."""
        self._listener.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(self._config.grace + _KILL_DELAY):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def http_beside(config: HttpConfig, gateway: Path) -> AsyncIterator[str]:
    """Run the HTTP server in front of a gateway at its local socket; yield its URL.

    The load on its page comes from the admin socket beside it. Raises ConfigError if it cannot be
    run.
    """
    process = HttpProcess(config, f"unix:{gateway}", f"unix:{admin_socket(gateway)}")
    try:
        await process.start()
        async with beside("keeping the HTTP server", process.keep):
            yield process.url
    finally:
        await process.stop()


def _log(line: str) -> None:
    """Log what it has logged, at the same level; what is no line of its log as an error."""
    try:
        told = json.loads(line)
        level, text = logging.getLevelNamesMapping()[told["level"].upper()], told["message"]
    except (ValueError, KeyError, TypeError):
        logger.error("http: %s", line)
        return
    if logger.isEnabledFor(level):
        record = logger.makeRecord(logger.name, level, "", 0, "http: %s", (text,), None)
        record.exc_text = told.get("traceback")
        logger.handle(record)


def _stderr(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    assert process.stderr is not None, "it is a pipe"
    return process.stderr
