"""The HTTP server beside a gateway, in a process of its own: started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from engine.background import in_background
from engine.errors import ConfigError
from server.config import FOLLOWING
from server.front_config import HttpConfig
from server.gateway.admin_port import admin_socket
from server.identity.config import CERTIFICATES
from server.ray import end_with_parent
from server.ray.run_directory import run_directory

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-c", "from server.cli import main; main()", "http")
# They would say of calls what the server that is called here does not need, or lend its token.
_NOT_HANDED_ON = frozenset(("TOKENWEIR_SERVER", "TOKENWEIR_TLS_CA", "TOKENWEIR_TOKEN"))
_ANNOUNCEMENT = re.compile(r" at (\S+)/v1,")
_PAUSE = 1.0  # seconds between two attempts
_LAST_WORDS = 5.0  # seconds beyond its own grace


@contextlib.contextmanager
def private_socket() -> Iterator[Path]:
    """Yield a path for a socket that nobody but this user reaches."""
    with run_directory() as directory:
        yield directory.path / "gateway"


class HttpProcess:
    """Runs `tokenweir http` until it is told to end."""

    def __init__(self, options: Sequence[str], port: int, grace: float) -> None:
        self._options, self._port, self._grace = options, port, grace
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""  # while it does not listen

    @property
    def pid(self) -> int:
        """The process, once it was started."""
        assert self._process is not None, "it was started"
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it listens; ConfigError with its words if it does not."""
        self.url = ""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", end_with_parent.__file__, *_COMMAND, *self._options),
            *("--port", str(self._port), "--grace", str(self._grace), "--insecure"),
            *("--log-format", "json"),
            env=_environment(os.environ),
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for the command that started it
        )
        self._process = process
        said = ""
        async for line in _stderr(process):  # with Python's warnings
            said += line.decode(errors="replace")
            if found := _ANNOUNCEMENT.search(said):
                self.url = found[1]
                break
        else:
            await process.wait()
            raise ConfigError(f"the HTTP server does not start: {said.strip()}")
        self._port = int(self.url.rpartition(":")[2])  # that of the next one too

    async def keep(self) -> None:
        """Log what it says, and start it again when it dies; until cancelled."""
        while True:
            assert self._process is not None, "it was started"
            async for line in _stderr(self._process):
                _log(line.decode(errors="replace").rstrip())
            code = await self._process.wait()
            logger.error("the HTTP server has ended with %d, and is started again", code)
            while not await self._started():
                await asyncio.sleep(_PAUSE)

    async def _started(self) -> bool:
        try:
            await self.start()
        except ConfigError as error:
            logger.error("%s", error)
            return False
        return True

    async def stop(self) -> None:
        """Let its open requests end, and itself."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(self._grace + _LAST_WORDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def http_beside(config: HttpConfig, socket: Path, *, has_admin: bool) -> AsyncIterator[str]:
    """Run the HTTP server in front of a gateway at its local socket; yield its URL.

    The load on its page comes from the admin port beside the socket, where there is one. Raises
    ConfigError if it cannot be run.
    """
    file = socket.with_suffix(".toml")
    file.write_text(_section(config))
    options = ["--server", f"unix:{socket}", "--host", config.host, "--config", str(file)]
    for name in CERTIFICATES:
        if (path := getattr(config.tls, name)) is not None:
            options += [f"--listen-{name.replace('_', '-')}", str(path)]
    if has_admin:
        options += ["--admin", f"unix:{admin_socket(socket)}"]
    process = HttpProcess(options, config.port, config.grace)
    await process.start()
    keeping = in_background("keeping the HTTP server", process.keep)
    try:
        yield process.url
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
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


def _section(config: HttpConfig) -> str:
    """Return the settings that a file may have, numbers and lists of texts, as its section."""
    names = (one.name for one in fields(config) if f"http.{one.name}" not in FOLLOWING)
    lines = (f"{name} = {json.dumps(getattr(config, name))}" for name in names)
    return "\n".join(["[http]", *lines])


def _stderr(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    assert process.stderr is not None, "it is a pipe"
    return process.stderr


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in ours.items() if name not in _NOT_HANDED_ON}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
