"""Tasks beside the calls: what happens to them when they fail."""

from __future__ import annotations

import asyncio

import pytest

from engine.background import in_background


async def test_a_task_that_fails_is_logged_and_begins_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs: list[int] = []

    async def work() -> None:
        runs.append(len(runs))
        if len(runs) == 1:
            raise ZeroDivisionError("a bug")

    await asyncio.wait_for(in_background("following", work, restart_pause=0), 60)

    assert runs == [0, 1]
    (record,) = caplog.records
    assert (record.levelname, record.exc_info is not None) == ("ERROR", True)
    assert record.getMessage() == "following has failed; it begins anew in 0 s"


async def test_a_task_that_is_not_to_begin_anew_is_logged_and_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        raise ZeroDivisionError("a bug")

    await asyncio.wait_for(in_background("leaving", work, restart_pause=None), 60)

    assert [r.getMessage() for r in caplog.records] == ["leaving has failed; it is given up"]


async def test_a_cancelled_task_does_not_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    task = in_background("following", work)
    await started.wait()
    task.cancel()
    await asyncio.wait([task], timeout=60)

    assert task.cancelled()
    assert caplog.records == []
