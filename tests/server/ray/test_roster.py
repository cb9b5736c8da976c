"""Messages of workers to the command that serves them: that they live, and their log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.ray import roster_link
from server.ray.last_words import last_words
from server.ray.registry import Registry, WorkerInfo
from server.ray.restarts import Restarts
from server.ray.roster import Roster, RosterAddress
from server.ray.roster_link import LinkHandler, RosterLink
from server.telemetry.log_budget import RECORDS_AT_ONCE, RECORDS_PER_SECOND
from server.telemetry.logs import TextFormatter, fields_of
from tests.fakes.calls import until
from tests.fakes.clock import FakeClock

WORKER = WorkerInfo("127.0.0.1:1", pid=1, replica_id="a")
WORKER_2 = WorkerInfo("127.0.0.1:2", pid=2, replica_id="b")


@contextlib.asynccontextmanager
async def _listening(registry: Registry) -> AsyncIterator[tuple[Roster, RosterAddress]]:
    roster = Roster(registry)
    try:
        yield roster, await roster.start("127.0.0.1")
    finally:
        await roster.close()


async def test_worker_is_known_while_it_is_connected() -> None:
    registry = Registry()
    async with _listening(registry) as (_, address):
        link = RosterLink(address)
        link.alive(WORKER)
        joined = await asyncio.wait_for(registry.changed(()), 60)
        await link.close()
        left = await asyncio.wait_for(registry.changed(joined), 60)

    assert (joined, left) == ((WORKER,), ())


async def test_link_that_is_closed_as_there_is_something_to_tell_ends() -> None:
    registry = Registry()
    async with _listening(registry) as (_, address):
        link = RosterLink(address)
        link.alive(WORKER)
        await until(lambda: registry.workers)

        link.alive(WORKER)
        async with asyncio.timeout(60):
            await link.close()

    assert link.broken


async def test_worker_knows_for_how_long_it_has_not_reached_the_command() -> None:
    clock, registry = FakeClock(), Registry()
    async with _listening(registry) as (_, address):
        link = RosterLink(address, clock)
        clock.now += 60
        assert link.silence == 60  # it has never reached it

        link.alive(WORKER)
        await until(lambda: registry.workers)
        connected = link.silence
    await until(lambda: not registry.workers)
    clock.now += 7
    link.alive(WORKER)
    gone = link.silence
    await link.close()

    assert (connected, gone) == (0, 7)


async def test_worker_that_leaves_is_forgotten_while_it_is_still_connected() -> None:
    registry = Registry()
    async with _listening(registry) as (_, address):
        link = RosterLink(address)
        link.alive(WORKER)
        await asyncio.wait_for(registry.changed(()), 60)
        over = await link.leave()
        left, broken = registry.workers, link.broken
        await link.close()

    assert (over, left, broken) == (False, (), False)


async def test_worker_that_leaves_at_the_end_is_told_that_all_is_over() -> None:
    async with _listening(Registry()) as (roster, address):
        link = RosterLink(address)
        link.alive(WORKER)
        roster.end()
        over = await link.leave()
        await link.close()

    assert over


async def test_worker_that_stands_still_is_forgotten_though_it_is_connected(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)
    registry = Registry(time_to_live=1)
    async with _listening(registry) as (_, address):
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(_hello(address.token) + _alive())
        assert await registry.changed(()) == (WORKER,)

        clock.now += 1.1
        left = await registry.changed((WORKER,))
        writer.close()

    assert left == ()


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"[\n",
        b"[" * 100_000 + b"\n",
        b"{}\n",
        b"7\n",
        b'{"token": "no", "pid": 1}\n',
        b"x" * 2_000_000,
    ],
)
async def test_who_does_not_know_the_token_is_not_heard(
    first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()
    async with _listening(registry) as (_, address):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(first + _alive())
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 60)
        writer.close()

    assert registry.workers == ()
    assert not caplog.text


async def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.ray.roster._FIRST_WORDS", 0.05)
    async with _listening(Registry()) as (_, address):
        reader, writer = await asyncio.open_connection(address.host, address.port)

        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


async def test_log_of_a_worker_is_told_with_its_name_and_whole_tracebacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _listening(Registry()) as (_, address):
        link = RosterLink(address)
        link.alive(WORKER)
        try:
            raise ValueError("a\nb")
        except ValueError:
            record = _record(logging.ERROR, "request %s failed", "r-7", exc_info=True)
        LinkHandler(link).emit(record)
        await until(lambda: caplog.records)
        await link.close()

    (told,) = caplog.records
    assert told.levelno == logging.ERROR
    assert (told.name, fields_of(told)) == ("server", {"worker": "127.0.0.1:1"})
    text = TextFormatter().format(told)
    assert "worker 127.0.0.1:1: request r-7 failed\nTraceback (most recent" in text
    assert text.endswith("ValueError: a\nb")


async def test_link_connects_again_and_tells_what_waited(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    async with _listening(registry) as (_, address):
        link = RosterLink(RosterAddress(address.host, 1, address.token))  # nobody is there
        link.alive(WORKER)
        link.log(logging.ERROR, "told late")
        await asyncio.sleep(0.1)
        link._roster = address
        await asyncio.wait_for(registry.changed(()), 60)
        await until(lambda: caplog.records)
        await link.close()

    assert caplog.messages == ["told late"]
    assert fields_of(caplog.records[0]) == {"worker": "127.0.0.1:1"}


def test_flood_of_refusals_is_counted_and_hides_no_error(clock: FakeClock) -> None:
    link = _FakeLink()
    handler = LinkHandler(link, clock)  # type: ignore[arg-type]
    for _ in range(RECORDS_AT_ONCE + 5000):
        handler.emit(_record(logging.INFO, "refused"))
    handler.emit(_record(logging.ERROR, "failed"))
    clock.now += 1.01 / RECORDS_PER_SECOND
    handler.emit(_record(logging.INFO, "refused again"))

    assert link.told == [
        *["refused"] * RECORDS_AT_ONCE,
        "failed",
        "(5,000 lines like the next are left out)",
        "refused again",
    ]


@pytest.mark.parametrize("serves", [True, False])
async def test_what_a_worker_wrote_before_it_died_is_told(
    serves: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "err").write_text("x" * 10_000 + "\nFatal Python error: Segmentation fault\n")
    ends = list[tuple[str, bool | None]]()
    async with _listening(Registry()) as (roster, address):
        roster.explain_loss = lambda *end: ends.append(end)
        _, writer = await asyncio.open_connection(address.host, address.port)
        hello = {"token": address.token, "pid": 1, "stderr": str(tmp_path / "err")}
        writer.write(json.dumps(hello).encode() + b"\n" + (_alive() if serves else b""))
        await until(lambda: bool(roster._registry.workers) == serves)
        writer.close()
        await until(lambda: caplog.records)

    name = WORKER.address if serves else "process 1"
    assert fields_of(caplog.records[0]) == {"worker": name}
    assert ends == [(name, True)]
    assert caplog.messages == [
        "it ended; the last that it wrote:\nFatal Python error: Segmentation fault"
    ]


async def test_a_worker_that_leaves_as_it_should_has_no_last_words(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "err").write_text("a warning")
    monkeypatch.setattr(roster_link, "own_stderr", lambda: str(tmp_path / "err"))
    async with _listening(Registry()) as (roster, address):
        link = RosterLink(address)
        link.alive(WORKER)
        await until(lambda: roster._registry.workers)
        await link.leave()
        await link.close()
        await until(lambda: not roster.num_workers)

    assert caplog.messages == []


def test_a_process_knows_where_its_standard_error_goes(tmp_path: Path) -> None:
    program = "from server.ray.last_words import own_stderr; print(own_stderr())"
    with (tmp_path / "err").open("w") as file:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=file, text=True
        )
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert (done.stdout.strip(), piped.stdout.strip()) == (str(tmp_path / "err"), "")
    assert last_words("/nowhere") == ""


async def test_a_worker_in_the_place_of_one_that_was_lost_is_a_restart() -> None:
    async with _listening(Registry()) as (roster, address):
        first, second = RosterLink(address), RosterLink(address)
        first.alive(WORKER)
        await until(lambda: roster._registry.workers)
        await first.close()  # without a word
        await until(lambda: not roster._registry.workers)
        second.alive(WORKER_2)
        await until(lambda: roster._registry.workers)
        restarted = roster.restarts.count
        await second.leave()
        third = RosterLink(address)
        third.alive(WORKER)
        await until(lambda: roster._registry.workers)
        counts = restarted, roster.restarts.count
        await second.close()
        await third.close()

    assert counts == (1, 1)


def test_a_worker_whose_connection_broke_and_came_back_was_not_restarted() -> None:
    restarts = Restarts()
    restarts.joined("a")
    restarts.lost("a")
    restarts.joined("a")
    restarts.joined("b")

    assert restarts.count == 0


class _FakeLink:
    def __init__(self) -> None:
        self.told: list[str] = []

    def log(self, level: int, text: str, **more: object) -> None:
        self.told.append(text)


def _record(level: int, text: str, *args: object, exc_info: bool = False) -> logging.LogRecord:
    info = sys.exc_info() if exc_info else None
    return logging.LogRecord("server", level, __file__, 1, text, args, info)


def _hello(token: str) -> bytes:
    return json.dumps({"token": token, "pid": 1}).encode() + b"\n"


def _alive() -> bytes:
    worker = {"address": WORKER.address, "pid": WORKER.pid, "replica_id": WORKER.replica_id}
    return json.dumps({"alive": worker}).encode() + b"\n"
