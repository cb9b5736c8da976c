"""Listens for the workers of a service: which are alive, and what they have to say.

Every worker keeps one connection to the command that serves, and writes a line of JSON a message:

    {"token": "...", "pid": 4711, "stderr": "/..."}     the first: only who knows the token is
                                        heard; where it writes what it does not log
    {"alive": {"address": ..., "pid": ..., "replica_id": ...}}    once a second while it serves
    {"leaving": true, "fails": false}   it takes no more calls, for it is told to end, or because it
                                        fails; the answer is a line, true if all is over, so that
                                        it need not wait for anybody
    {"level": 40, "text": "...", ...}   a record of its log: logger, fields and traceback, if any

A gateway in another process says `"follows": true` in its first line, and nothing more. It is told,
once a second and when that has changed:

    {"workers": ["10.0.0.7:41231", ...], "traffic": {...}}

The traffic is that of a gateway at which models are loaded, if there is one; see Traffic.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.auth.peers import NAME, Peers
from server.ray.last_words import has_crashed, last_words, num_oom_kills
from server.ray.registry import HEARTBEAT, Registry, WorkerInfo
from server.ray.restarts import Restarts
from server.telemetry.logs import with_fields

MAX_LINE = 1 << 20  # bytes of a message
_FIRST_WORDS = 5.0  # seconds until a connection says whose it is
TELL_PERIOD = 0.2  # seconds between two looks at what has changed
# Connections that break, and broken lines: nothing that the other side did not cause.
_BROKEN = (OSError, ValueError, TypeError, KeyError, RecursionError)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RosterAddress:
    """The address of a roster, and the token that it asks for."""

    host: str
    port: int
    token: str = field(repr=False)
    peers: Peers | None = None  # if other machines reach the host: only they connect


async def connect(roster: RosterAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection to a roster; OSError without one."""
    if roster.peers is None:
        return await asyncio.open_connection(roster.host, roster.port, limit=MAX_LINE)
    context = roster.peers.context(ssl.Purpose.SERVER_AUTH)
    return await asyncio.open_connection(
        roster.host, roster.port, limit=MAX_LINE, ssl=context, server_hostname=NAME
    )


class Roster:
    """The server side of the connections."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._token = secrets.token_hex(16)
        self._hearing: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._following: set[asyncio.Task[None]] = set()
        self.restarts = Restarts()
        self.traffic: Callable[[], Mapping[str, Any]] | None = None  # from the gateway beside it
        self.explain_loss: Callable[[str, bool | None], None] | None = None  # likewise, to it

    @property
    def num_workers(self) -> int:
        """The number of workers that are connected, serving or not yet."""
        return len(self._hearing)

    @property
    def num_followers(self) -> int:
        """The number of gateways in other processes that follow the workers."""
        return len(self._following)

    def end(self) -> None:
        """Tell workers that leave that all is over: every call has had the time to end."""
        self._is_over = True

    async def start(
        self, host: str, peers: Peers | None = None, token: str | None = None
    ) -> RosterAddress:
        """Listen on any free port of the interface; with `peers` for them only.

        The token is that of an earlier roster whose place this one takes.
        """
        self._token = token or self._token
        context = None if peers is None else peers.context(ssl.Purpose.CLIENT_AUTH)
        self._server = await asyncio.start_server(self._take, host, 0, limit=MAX_LINE, ssl=context)
        port = self._server.sockets[0].getsockname()[1]
        return RosterAddress(host, port, self._token, peers)

    async def close(self) -> None:
        """Hear nobody any more."""
        self._server.close()
        tasks = (*self._hearing, *self._following)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, until it or the roster ends."""
        task = asyncio.current_task()
        assert task is not None
        # Cancelled is it by `close`; asyncio would report a task of its own that is.
        with contextlib.suppress(*_BROKEN, asyncio.CancelledError):
            async with asyncio.timeout(_FIRST_WORDS):
                first = json.loads(await reader.readline())
            if hmac.compare_digest(str(first["token"]), self._token):
                tasks = self._following if first.get("follows") else self._hearing
                tasks.add(task)
                try:
                    if first.get("follows"):
                        await self._tell(reader, writer)
                    else:
                        await self._hear(first, reader, writer)
                finally:
                    tasks.discard(task)
        writer.close()

    async def _hear(
        self, first: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Hear a worker."""
        speaker = _Speaker(self._registry, self.restarts)
        speaker.name = f"process {int(first['pid'])}"
        speaker.stderr, oom_kills = str(first.get("stderr", "")), num_oom_kills()
        try:
            while line := await reader.readline():
                if speaker.leaves(json.loads(line)):
                    is_over = self._is_over and not self._following
                    writer.write(json.dumps(is_over).encode() + b"\n")
        finally:
            speaker.leave(is_lost=True)
            if self.explain_loss is not None:
                self.explain_loss(speaker.name, has_crashed(speaker.stderr, oom_kills))
            if not self._is_over:
                speaker.tell_last_words()

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tell a gateway of the workers."""
        last, since = b"", 0.0
        while not reader.at_eof():
            workers = [worker.address for worker in self._registry.workers]
            told: dict[str, Any] = {"workers": workers}
            if self.traffic is not None:
                told["traffic"] = self.traffic()
            line = json.dumps(told).encode() + b"\n"
            if line != last or time.monotonic() > since + HEARTBEAT:
                writer.write(line)
                await writer.drain()
                last, since = line, time.monotonic()
            await asyncio.sleep(TELL_PERIOD)


class _Speaker:
    """One worker at the other end of a connection."""

    def __init__(
        self,
        registry: Registry,
        restarts: Restarts,
    ) -> None:
        self.name = self.stderr = ""
        self._has_left = False
        self._registry = registry
        self._restarts = restarts
        self._worker: WorkerInfo | None = None

    def leaves(self, message: dict[str, Any]) -> bool:
        """Take a message; return whether it says that the worker leaves."""
        if "alive" in message:
            self._live(WorkerInfo(**message["alive"]))
        elif "leaving" in message:
            self._has_left = True
            self.leave(is_lost=bool(message.get("fails")))
        else:
            self._log(message)
        return "leaving" in message

    def _log(self, message: dict[str, Any]) -> None:
        """Log what the worker has logged, as if it had happened here, with its name."""
        speaker = logging.getLogger(str(message.get("logger", __name__)))
        level = int(message["level"])
        if speaker.isEnabledFor(level):
            of_worker = with_fields(**{**message.get("fields", {}), "worker": self.name})
            record = speaker.makeRecord(
                speaker.name, level, "", 0, str(message["text"]), (), None, extra=of_worker
            )
            record.exc_text = message.get("traceback") or None
            speaker.handle(record)

    def leave(self, *, is_lost: bool) -> None:
        """Take the worker out of the registry, once; lost is one that was not told to go."""
        if (worker := self._worker) is None:
            return
        self._worker = None
        self._registry.drop(worker)
        if is_lost:
            self._restarts.lost(worker.replica_id)

    def tell_last_words(self) -> None:
        """Log what a worker has written that ended without a word."""
        if not self._has_left and (text := last_words(self.stderr)):
            fields = with_fields(worker=self.name)
            logger.error("it ended; the last that it wrote:\n%s", text, extra=fields)

    def _live(self, worker: WorkerInfo) -> None:
        if self._worker is None:
            self._restarts.joined(worker.replica_id)
        self._worker, self.name = worker, worker.address
        self._registry.put(worker)
