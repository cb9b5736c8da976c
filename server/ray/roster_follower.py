"""Keeps a gateway's workers equal to those of a service that another process serves."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from server.auth.peers import Peers
from server.ray.registry import HEARTBEAT, TIME_TO_LIVE
from server.ray.roster import RosterAddress, connect

logger = logging.getLogger(__name__)


class Follower(Protocol):
    """A gateway, which hears of workers."""

    def trust(self, peers: Peers | None) -> None:
        """Use this certificate for workers that are new from now on."""

    async def sync(self, workers: list[str]) -> None:
        """Send new calls to these workers only."""

    async def divide(self, traffic: Mapping[str, Any]) -> None:
        """Send versions of models the calls that this says."""


Find = Callable[[], Awaitable[RosterAddress | None]]


class RosterFollower:
    """Listens to a roster, and finds it again wherever it is started anew.

    While there is none, the workers that are known stay: they say themselves how they are.
    """

    def __init__(
        self, find: Find, gateway: Follower, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._find = find
        self._gateway = gateway
        self._clock = clock
        self._known: tuple[str, ...] = ()
        self._is_lost = False  # it has been logged

    async def follow(self) -> None:
        """Follow for ever."""
        while True:
            try:
                await self._follow_one()
                self._lose("it has ended the connection")
            except (OSError, ValueError, TypeError, KeyError) as error:
                self._lose(str(error) or type(error).__name__)
            await asyncio.sleep(HEARTBEAT)

    async def _follow_one(self) -> None:
        """Follow a roster for as long as it is heard."""
        address = await self._find()
        if address is None:
            raise OSError("nobody serves under this name")
        reader, writer = await connect(address)
        try:
            first = {"token": address.token, "pid": os.getpid(), "follows": True}
            writer.write(json.dumps(first).encode() + b"\n")
            self._gateway.trust(address.peers)
            since = self._clock()
            while line := await _next_line(reader):
                await self._take(json.loads(line), is_young=self._clock() < since + TIME_TO_LIVE)
        finally:
            writer.close()

    async def _take(self, message: Mapping[str, Any], *, is_young: bool) -> None:
        """Know the workers of a message; a young roster may not have heard of all of them yet."""
        if "traffic" in message:  # before the workers: a version that is being loaded is closed
            await self._gateway.divide(message["traffic"])
        told = tuple(str(address) for address in message["workers"])
        known = tuple(dict.fromkeys((*self._known, *told))) if is_young else told
        if known != self._known:
            logger.info("workers: %s", ", ".join(known) or "none")
            await self._gateway.sync(list(known))
            self._known = known
        if self._is_lost:
            logger.info("the workers of the service are told again")
            self._is_lost = False

    def _lose(self, reason: str) -> None:
        if not self._is_lost:
            logger.warning("the service does not tell its workers: %s; those known stay", reason)
            self._is_lost = True


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(TIME_TO_LIVE):
        return await reader.readline()
