"""The log of a worker: over the wire to who wants it, within a budget, else to its own error."""

from __future__ import annotations

import logging
import os
import sys

import pytest

from server.config import WorkerConfig
from server.gateway.backend import WorkerLink
from server.gateway.pool import Pool, do_nothing
from server.settings import Log
from server.telemetry.logs import RECORDS_AT_ONCE, RECORDS_PER_SECOND, TextFormatter, fields_of
from server.wire.work_pb2 import LogRecord
from server.wire.worker_log import WorkerLog, log_of_worker
from server.worker.worker import Worker
from tests.fakes.calls import until
from tests.fakes.clock import FakeClock
from tests.fakes.engines import FakeGenerator


@pytest.fixture
async def log(clock: FakeClock) -> WorkerLog:
    return WorkerLog(Log(), clock)


async def test_what_was_logged_before_anybody_wanted_it_is_told_and_what_comes(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING)
    log = WorkerLog(Log())
    worker = Worker({"dates": FakeGenerator()}, WorkerConfig(), log=log)
    log.handle(_record(logging.WARNING, "is loaded"))
    address = await worker.start()
    pools = [
        Pool(lambda: None, do_nothing, WorkerLink(60, logs=logs, only_watches=logs))
        for logs in (False, True)
    ]
    try:
        await pools[0].sync([address])
        await until(lambda: pools[0].serving)
        assert not caplog.records
        await pools[1].sync([address])
        await until(lambda: caplog.records)
        log.handle(_record(logging.ERROR, "fails"))
        await until(lambda: len(caplog.records) == 2)
        await until(lambda: worker.num_gateways == 1)  # who only watches is none
    finally:
        for pool in pools:
            await pool.close()
        await worker.drain(0)

    assert caplog.messages == ["is loaded", "fails"]
    assert [fields_of(record) for record in caplog.records] == [{"worker": address}] * 2
    written = capsys.readouterr().err
    assert "is loaded\n" in written, "as long as nobody wants it"
    assert "fails" not in written


async def test_a_record_is_told_with_its_fields_and_whole_traceback(
    log: WorkerLog, caplog: pytest.LogCaptureFixture
) -> None:
    told = list[LogRecord]()
    with log.given_to(told.append):
        try:
            raise ValueError("a\nb")
        except ValueError:
            record = _record(logging.ERROR, "request %s failed", "r-7", exc_info=True)
        record.fields = {"seconds": 0.5}
        log.handle(record)
        await until(lambda: told)
    log_of_worker(told[0], "127.0.0.1:1")

    (here,) = caplog.records
    assert here.levelno == logging.ERROR
    assert (here.name, fields_of(here)) == ("server", {"seconds": 0.5, "worker": "127.0.0.1:1"})
    text = TextFormatter().format(here)
    assert "worker 127.0.0.1:1: request r-7 failed seconds=0.5\nTraceback (most recent" in text
    assert text.endswith("ValueError: a\nb")


async def test_what_is_no_utf_8_is_told_and_of_a_long_traceback_the_end(log: WorkerLog) -> None:
    told = list[LogRecord]()
    with log.given_to(told.append):
        try:
            raise ValueError("x" * (1 << 17) + "the end")
        except ValueError:
            log.handle(_record(logging.ERROR, "no file %s", os.fsdecode(b"\xff"), exc_info=True))
        await until(lambda: told)

    assert told[0].text == "no file \\udcff"
    assert told[0].traceback.endswith("the end")


async def test_a_flood_of_refusals_is_counted_and_hides_no_error(
    log: WorkerLog, clock: FakeClock
) -> None:
    told = list[LogRecord]()
    with log.given_to(told.append):
        for _ in range(RECORDS_AT_ONCE + 5000):
            log.handle(_record(logging.INFO, "refused"))
        log.handle(_record(logging.ERROR, "failed"))
        clock.now += 1.01 / RECORDS_PER_SECOND
        log.handle(_record(logging.INFO, "refused again"))
        await until(lambda: told and told[-1].text == "refused again")

    assert [record.text for record in told] == [
        *["refused"] * RECORDS_AT_ONCE,
        "failed",
        "(5,000 lines like the next are left out)",
        "refused again",
    ]


def test_what_the_level_leaves_out_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    log_of_worker(LogRecord(level=logging.DEBUG, logger="server", text="a detail"), "127.0.0.1:1")

    assert not caplog.records


def _record(level: int, text: str, *args: object, exc_info: bool = False) -> logging.LogRecord:
    info = sys.exc_info() if exc_info else None
    return logging.LogRecord("server", level, __file__, 1, text, args, info)
