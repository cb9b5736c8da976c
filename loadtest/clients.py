"""Several processes that send one load test together, where one event loop is not enough."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from loadtest.answers import KeptAnswer, WrongAnswer
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.interruption import unheard_by_children
from loadtest.metrics import OwnLoad, RequestRecord
from loadtest.sender import Sender, Shard
from loadtest.target.open_target import Connect
from loadtest.work.ask import Work

_PART_PERIOD = 0.25  # seconds between what a process tells of its records


@dataclass(frozen=True)
class _Part:
    """The work of one process since its last message."""

    records: list[RequestRecord]
    kept: list[KeptAnswer]
    expected: list[WrongAnswer | None]
    num_in_flight: int
    own_load: OwnLoad | None = None  # comes with the last one


class Clients:
    """Sends as a Sender does, from processes of which each has its shard of the requests."""

    def __init__(self, config: LoadConfig, work: Work, connect: Connect) -> None:
        self._config = config
        self._work = work
        self._connect = connect
        self._processes: list[_Process] = []
        self.records: list[RequestRecord] = []
        self.kept: list[KeptAnswer] = []
        self.expected: list[WrongAnswer | None] = []

    @property
    def num_in_flight(self) -> int:
        return sum(process.num_in_flight for process in self._processes)

    @property
    def own_load(self) -> OwnLoad:
        """The load of the busiest process, and the worst delay of any."""
        loads = [one.own_load for one in self._processes if one.own_load is not None]
        if not loads:
            return OwnLoad(0.0, None, self._config.num_processes)
        delays = [load.loop_delay for load in loads if load.loop_delay is not None]
        return OwnLoad(
            max(load.processor_share for load in loads),
            max(delays, key=lambda delay: delay.p99, default=None),
            self._config.num_processes,
        )

    async def warm_up(self) -> None:
        """Start the processes; each warms up. Raises LoadTestError if one cannot."""
        number = self._config.num_processes
        for place in range(number):
            shard = Shard(place, number)
            self._processes.append(_Process(self._config, self._work, self._connect, shard))
        try:
            for process in self._processes:
                await process.receive()  # it is ready
        except BaseException:
            self._kill()
            raise

    async def send_all(self, start: float) -> None:
        """Send the requests and gather what the processes tell, until all have ended."""
        try:
            for process in self._processes:
                process.connection.send(start)
            await self._gather(self._processes)
        except asyncio.CancelledError:
            for process in self._processes:
                with suppress(OSError):
                    process.connection.send(None)
            await self._gather(self._processes)
            raise
        finally:
            self._kill()

    async def _gather(self, processes: Iterable[_Process]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for process in processes:
                    group.create_task(self._take_all(process))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _take_all(self, process: _Process) -> None:
        while process.own_load is None:
            part = await process.receive()
            if part is not None:
                self.records += part.records
                self.kept += part.kept
                self.expected += part.expected

    def _kill(self) -> None:
        for process in self._processes:
            process.end()


class _Process:
    """One process, as its parent sees it."""

    def __init__(self, config: LoadConfig, work: Work, connect: Connect, shard: Shard) -> None:
        context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
        self.connection, far = context.Pipe()
        self._process = context.Process(
            target=_run_client, args=(far, config, work, connect, shard), daemon=True
        )
        with unheard_by_children():  # the parent tells when to end
            self._process.start()
        far.close()
        self.num_in_flight = 0
        self.own_load: OwnLoad | None = None

    async def receive(self) -> _Part | None:
        """Return the next part, None for a process that is ready; LoadTestError for its end."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_reader(self.connection.fileno(), arrived.set)
        try:
            while not self.connection.poll():
                arrived.clear()
                await arrived.wait()
            message = self.connection.recv()
        except (EOFError, OSError) as error:
            raise LoadTestError("a process of the load test has ended before its work") from error
        finally:
            loop.remove_reader(self.connection.fileno())
        if isinstance(message, Exception):
            raise message
        if isinstance(message, _Part):
            self.num_in_flight, self.own_load = message.num_in_flight, message.own_load
            return message
        return None

    def end(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _run_client(
    connection: Connection, config: LoadConfig, work: Work, connect: Connect, shard: Shard
) -> None:
    with suppress(BrokenPipeError, EOFError):  # the parent is gone
        asyncio.run(_client(connection, config, work, connect, shard))


async def _client(
    connection: Connection, config: LoadConfig, work: Work, connect: Connect, shard: Shard
) -> None:
    target = connect()
    sender = Sender(target, config, work, shard)
    try:
        await target.find()
        await sender.warm_up()
        connection.send(None)
        start = await asyncio.to_thread(connection.recv)
        if start is not None:
            await _send_until_told(connection, sender, start)
    except LoadTestError as error:
        connection.send(error)
    finally:
        await target.close()


async def _send_until_told(connection: Connection, sender: Sender, start: float) -> None:
    """Send, tell of it, and end when all is sent or the parent says so."""
    loop = asyncio.get_running_loop()
    sending = asyncio.create_task(sender.send_all(start))

    def stop() -> None:  # told so, or the parent is gone
        loop.remove_reader(connection.fileno())
        sending.cancel()

    loop.add_reader(connection.fileno(), stop)
    while not sending.done():
        await asyncio.wait([sending], timeout=_PART_PERIOD)
        connection.send(_part_of(sender))
    with suppress(asyncio.CancelledError):
        await sending
    connection.send(replace(_part_of(sender), own_load=sender.own_load))


def _part_of(sender: Sender) -> _Part:
    """Take what the sender has gathered since the last time."""
    part = _Part(sender.records, sender.kept, sender.expected, sender.num_in_flight)
    sender.records, sender.kept, sender.expected = [], [], []
    return part
