"""Workers in the table of keys: which of them a gateway knows, and which it has lost."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.errors import EngineFailure
from server.auth.internal_certificate import InternalCertificate, internal_certificate
from server.ray.discovery import TIME_TO_LIVE, Discovery, Restarts
from server.ray.entries import SERVICE, Presence, ServiceEntry, WorkerEntry
from server.ray.replica import _service_in, _tell_application
from server.ray.serving import _withdraw, kill_hung
from server.ray.stderr_tail import stderr_tail
from server.ray.thread import RayThread
from server.settings import Packages, Settings
from server.telemetry.logs import fields_of
from tests.fakes.calls import until
from tests.fakes.clock import FakeClock
from tests.fakes.table import FakeTable, worker_at

ONE, TWO = worker_at("127.0.0.1:1"), worker_at("127.0.0.1:2")
CRASH = "Fatal Python error: Segmentation fault"


class FakePool:
    """Remembers what it is told, in order; it hears whom a test says."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.responsive: set[str] = set()

    @property
    def addresses(self) -> list[str]:
        return next((one for one in reversed(self.told) if isinstance(one, list)), [])

    def trust(self, certificate: InternalCertificate | None) -> None:
        self.told.append(certificate)

    async def sync(self, addresses: list[str]) -> None:
        self.told.append(addresses)

    async def apply_traffic(self, traffic: Mapping[str, Any]) -> None:
        self.told.append(traffic)

    def is_responsive(self, address: str, within: float) -> bool:
        return address in self.responsive


class Look:
    """A discovery of a table, and the pool that it keeps."""

    def __init__(self, clock: FakeClock) -> None:
        self.table, self.pool = FakeTable(), FakePool()
        self.discovery = Discovery(self.table, clock)
        self.table.serve()

    async def __call__(self) -> list[str]:
        """Look once; return whom the pool knows then."""
        await self.discovery.look(self.pool)
        return self.pool.addresses


@pytest.fixture
def look(clock: FakeClock) -> Look:
    return Look(clock)


async def test_a_gateway_knows_workers_that_serve_and_those_that_start_are_counted(
    look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server")
    starting = replace(TWO, address="", replica_id="")
    look.table.publish(ONE)
    look.table.publish(starting)
    look.table.put("of another release", b'{"state": "asleep"}')

    assert await look() == [ONE.address]
    assert look.discovery.num_here == 2
    look.table.publish(TWO)
    assert await look() == [ONE.address, TWO.address]
    assert caplog.messages == [f"joined: {ONE}", f"joined: {TWO}"]


async def test_a_worker_that_leaves_is_known_no_more_though_it_still_writes(
    look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server")
    look.table.publish(ONE)
    await look()

    for _ in range(2):
        look.table.publish(replace(ONE, state="leaving"))
        assert await look() == []
    assert (look.discovery.workers, look.discovery.num_here) == ((), 0)
    assert caplog.messages == [f"joined: {ONE}", f"left: {ONE}"]


async def test_a_worker_that_neither_writes_nor_tells_anything_is_forgotten(
    look: Look, clock: FakeClock
) -> None:
    look.table.publish(ONE)
    look.pool.responsive.add(ONE.address)
    assert await look() == [ONE.address]

    clock.now += TIME_TO_LIVE + 0.1
    assert await look() == [ONE.address], "it is heard"
    look.table.publish(ONE)
    look.pool.responsive.clear()
    clock.now += TIME_TO_LIVE - 0.1
    assert await look() == [ONE.address], "it writes"
    clock.now += TIME_TO_LIVE + 0.1
    assert await look() == []
    assert [*look.table.values] == [SERVICE], "nobody meets it again"


async def test_workers_stay_known_to_a_process_that_was_stopped_as_it_read(
    look: Look, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    look.table.publish(ONE)
    await look()
    read = look.table.read

    def stopped() -> dict[str, bytes]:
        found = read()
        clock.now += TIME_TO_LIVE + 0.1
        return found

    monkeypatch.setattr(look.table, "read", stopped)
    assert await look() == [ONE.address]


async def test_an_entry_that_somebody_else_has_deleted_is_gone_at_once_unless_it_is_heard(
    look: Look,
) -> None:
    look.table.publish(ONE)
    look.pool.responsive.add(ONE.address)
    await look()

    look.table.delete(ONE.key)
    assert await look() == [ONE.address]
    look.pool.responsive.clear()
    assert await look() == []


async def test_workers_of_an_earlier_start_of_the_service_are_not_known_and_cleared_away(
    look: Look, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    look.table.publish(replace(ONE, service="earlier"))
    look.table.publish(TWO)

    assert await look() == [TWO.address]
    clock.now += TIME_TO_LIVE + 0.1
    look.table.publish(TWO)
    assert await look() == [TWO.address]
    assert {*look.table.values} == {SERVICE, TWO.key}
    assert not _errors(caplog)


async def test_workers_stay_known_while_the_table_is_not_there_and_when_another_start_is_told(
    look: Look, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.ray.discovery.LOOK_PERIOD", 0.001)
    caplog.set_level(logging.INFO, "server")
    look.table.publish(ONE)
    look.pool.responsive.add(ONE.address)
    following = asyncio.create_task(look.discovery.follow(look.pool))
    await until(lambda: look.pool.addresses == [ONE.address])

    look.table.is_broken = True
    await until(lambda: "the cluster does not answer; those known stay" in caplog.text)
    look.table.is_broken = False
    await until(lambda: "are told again" in caplog.text)
    look.table.delete(SERVICE)
    await until(lambda: "nobody serves under this name; those known stay" in caplog.text)
    look.table.serve(service="again")
    look.table.publish(worker_at("127.0.0.1:9", service="again"))
    await until(lambda: len(look.pool.addresses) == 2)

    await until(lambda: caplog.text.count("are told again") == 2)
    following.cancel()


@pytest.mark.parametrize("certificate", [None, internal_certificate("10.0.0.7")])
async def test_certificate_and_traffic_of_the_service_are_told_before_its_workers(
    look: Look, certificate: InternalCertificate | None
) -> None:
    traffic = {"shares": {}, "closed": [["dates", "2"]]}
    entry = ServiceEntry("s", certificate, 1 << 20, 33, traffic=traffic)
    look.table.put(SERVICE, entry.to_json())
    look.table.publish(ONE)

    await look()
    await look()

    assert look.pool.told == [certificate, traffic, [ONE.address]]
    assert look.discovery.service == entry


async def test_a_command_tells_others_whatever_changes_and_hears_nothing_of_itself(
    look: Look,
) -> None:
    own = ServiceEntry("s", None, 1 << 20, 33, traffic={"closed": []})
    await look.discovery.publish(lambda: own)
    assert look.table.get(SERVICE) == own.to_json()

    own = replace(own, traffic={"closed": [["dates", "2"]]})
    await look()

    assert look.table.get(SERVICE) == own.to_json()
    assert look.pool.told == []


@pytest.mark.parametrize("serves", [True, False])
async def test_the_last_that_a_worker_wrote_before_it_died_is_told(
    serves: bool, look: Look, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "err").write_text("x" * 10_000 + f"\n{CRASH}\n")
    process = await asyncio.create_subprocess_exec("sleep", "60")
    worker = worker_at(ONE.address if serves else "", pid=process.pid, stderr=str(tmp_path / "err"))
    look.table.publish(worker)
    await look()
    assert look.discovery.num_here == 1
    process.kill()
    await process.wait()
    look.table.publish(worker)  # it was about to be written

    await look()

    assert look.discovery.num_here == 0
    assert [one.getMessage() for one in _errors(caplog)] == [
        f"it ended; the last that it wrote:\n{CRASH}"
    ]
    name = ONE.address if serves else f"process {process.pid}"
    assert fields_of(_errors(caplog)[0]) == {"worker": name}
    assert look.discovery.has_crashed(ONE.address) is (True if serves else None)
    look.table.publish(TWO)
    await look()
    assert look.discovery.snapshot() == [("worker_restarts", (), int(serves))]


async def test_a_worker_that_leaves_as_it_should_leaves_nothing_to_read(
    look: Look, clock: FakeClock, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "err").write_text("a warning")
    worker = worker_at(ONE.address, pid=os.getpid(), stderr=str(tmp_path / "err"))
    look.table.publish(worker)
    await look()
    assert look.discovery.has_crashed(ONE.address) is False

    look.table.publish(replace(worker, state="leaving"))
    await look()
    clock.now += TIME_TO_LIVE + 0.1
    await look()

    assert not _errors(caplog)
    assert [*look.table.values] == [SERVICE]


async def test_a_worker_here_that_loads_and_writes_nothing_meanwhile_has_not_ended(
    look: Look, clock: FakeClock, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "err").write_text("a warning")
    look.table.publish(worker_at("", pid=os.getpid(), stderr=str(tmp_path / "err")))
    await look()
    clock.now += TIME_TO_LIVE + 0.1

    await look()

    assert (look.discovery.num_here, _errors(caplog)) == (1, [])


async def test_a_worker_that_is_known_and_hangs_has_not_ended(
    look: Look, clock: FakeClock, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "err").write_text("a warning")
    look.table.publish(worker_at(ONE.address, pid=os.getpid(), stderr=str(tmp_path / "err")))
    assert await look() == [ONE.address]
    clock.now += TIME_TO_LIVE + 0.1

    assert await look() == []
    assert not _errors(caplog)


async def test_what_nobody_could_write_meanwhile_is_missed_of_nobody(
    look: Look,
    clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.ray.discovery.LOOK_PERIOD", 0.001)
    look.table.publish(ONE)
    look.table.publish(starting := worker_at("", pid=2))
    following = asyncio.create_task(look.discovery.follow(look.pool))
    await until(lambda: look.discovery.num_here == 2)
    looks, read = 0, look.table.read

    def count() -> dict[str, bytes]:
        nonlocal looks
        looks += 1
        return read()

    look.table.is_broken = True
    monkeypatch.setattr(look.table, "read", count)
    await until(lambda: "those known stay" in caplog.text)
    clock.now += TIME_TO_LIVE + 0.1
    before = looks
    await until(lambda: looks > before + 1)  # one that began before has ended
    look.table.is_broken = False
    before = looks
    await until(lambda: looks > before + 3)

    assert look.discovery.num_here == 2 and starting.key in look.table.values
    following.cancel()


async def test_an_entry_that_cannot_be_deleted_does_not_come_back(
    look: Look, clock: FakeClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "server")
    look.table.publish(ONE)
    await look()
    clock.now += TIME_TO_LIVE + 0.1

    def refuse(key: str) -> None:
        raise OSError("the cluster does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(look.table, "delete", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="does not answer"):
                await look()
    await look()

    assert caplog.messages == [f"joined: {ONE}", f"left: {ONE}"]


async def test_the_entry_of_a_command_that_the_table_has_lost_is_written_again(
    look: Look,
) -> None:
    own = ServiceEntry("s", None, 1 << 20, 33)
    await look.discovery.publish(lambda: own)
    look.table.values.clear()
    await look()

    assert look.table.get(SERVICE) == own.to_json()


async def test_a_service_that_ends_leaves_no_keys(look: Look) -> None:
    for number in range(3):
        look.table.publish(worker_at(f"127.0.0.1:{number}"))

    await _withdraw(look.table)

    assert look.table.values == {}


async def test_why_a_worker_cannot_start_is_told_once(
    look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    failed = replace(ONE, address="", state="failed", problem="no such input")
    for _ in range(2):
        look.table.publish(failed)
        await look()

    look.table.publish(replace(failed, pid=2))  # Ray tries again
    await look()

    assert [one.getMessage() for one in _errors(caplog)] == ["it cannot start: no such input"]
    assert fields_of(_errors(caplog)[0]) == {"worker": "process 1"}
    look.table.publish(TWO)
    await look()
    look.table.publish(replace(failed, pid=3))
    await look()
    assert len(_errors(caplog)) == 2, "it is another start"


@pytest.mark.parametrize(("state", "counted"), [("failed", 1), ("leaving", 0)])
async def test_a_worker_in_the_place_of_one_that_was_lost_is_a_restart(
    state: Any, counted: int, look: Look
) -> None:
    look.table.publish(ONE)
    await look()
    look.table.publish(replace(ONE, state=state))
    await look()
    look.table.publish(TWO)
    await look()

    assert look.discovery.restarts.count == counted


def test_a_worker_that_was_lost_and_came_back_was_not_restarted() -> None:
    restarts = Restarts()
    restarts.joined("a")
    restarts.lost("a")
    restarts.joined("a")
    restarts.joined("b")

    assert restarts.count == 0


async def test_workers_that_have_left_can_be_killed_for_a_while_and_are_then_forgotten(
    look: Look, clock: FakeClock
) -> None:
    killed: list[object] = []

    async def run(_: object, actor: object) -> None:
        killed.append(actor)

    workers = [worker_at(f"127.0.0.1:{number}") for number in range(1, 151)]
    for worker in workers:
        look.table.publish(worker)
    await look()
    for worker in workers:
        look.table.publish(replace(worker, state="leaving"))
    await look()
    clock.now += TIME_TO_LIVE + 0.1
    await look()

    ray = cast(RayThread, SimpleNamespace(run=run))
    for worker in (workers[0], workers[-1]):
        await kill_hung(ray, look.discovery, worker.address)

    assert killed == [workers[-1].actor]


async def test_a_worker_writes_its_entry_again_and_again_and_what_changes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.ray.entries.BEAT", 0.001)
    table = FakeTable()
    presence = Presence(table, replace(ONE, address=""))

    def told() -> WorkerEntry:
        return WorkerEntry.from_json(table.values[ONE.key])

    await until(lambda: ONE.key in table.values and told().beat > 2)
    table.is_broken = True
    await presence.publish(address=ONE.address)
    table.is_broken = False
    await until(lambda: told().address == ONE.address)
    await presence.publish(state="leaving")
    assert told().state == "leaving"
    await presence.close()


@pytest.mark.parametrize("data", [b"", b"[", b"{}", b"7", b"[" * 100_000])
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    for entry in (ServiceEntry, WorkerEntry):
        with pytest.raises(ValueError, match="not one that this release reads"):
            entry.from_json(data)


def test_workers_of_an_application_have_one_certificate_and_tell_its_limits() -> None:
    table, config = FakeTable(), Settings(packages=Packages({"dates": Path("one")}))
    for _ in range(2):  # on different nodes
        _tell_application(table, config, "10.0.0.7")
    first = _service_in(table, None)
    _tell_application(table, config.with_engine(max_num_seqs=99), "10.0.0.8")
    renewed = _service_in(table, None)

    assert first.certificate is not None
    assert replace(renewed, max_calls_per_worker=first.max_calls_per_worker) == first
    assert renewed.max_calls_per_worker == 99


def test_a_worker_whose_command_is_gone_does_not_start() -> None:
    table = FakeTable()
    with pytest.raises(EngineFailure, match="the command that has started this worker is gone"):
        _service_in(table, "s")
    table.serve(service="another")
    with pytest.raises(EngineFailure, match="is gone"):
        _service_in(table, "s")
    table.serve(service="s")

    assert _service_in(table, "s").id == "s"


def test_a_process_knows_where_its_standard_error_goes(tmp_path: Path) -> None:
    program = "from server.ray.stderr_tail import own_stderr; print(own_stderr())"
    with (tmp_path / "err").open("w") as file:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=file, text=True
        )
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert (done.stdout.strip(), piped.stdout.strip()) == (str(tmp_path / "err"), "")
    assert stderr_tail("/nowhere") == ""


def _errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno == logging.ERROR]
