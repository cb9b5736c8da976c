"""Calls that may never end, made for who must."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Iterator
from unittest.mock import AsyncMock

import pytest

from server.ray.thread import RayLost, RayThread, watch


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """The event that hanging calls wait for; set at the end: threads must not outlive a test."""
    event = threading.Event()
    yield event
    event.set()


async def test_result_and_error_of_a_call_are_given() -> None:
    with RayThread() as ray:
        assert await ray.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await ray.run(divmod, 7, 0)


async def test_call_is_given_up_when_ray_is_lost(release: threading.Event) -> None:
    with pytest.raises(RayLost, match="the raylet is gone"):
        with RayThread() as ray:
            call = asyncio.create_task(ray.run(release.wait))
            await asyncio.sleep(0)
            ray.lose("the raylet is gone")
            async with asyncio.timeout(60):
                await call


async def test_no_call_is_made_once_ray_is_lost() -> None:
    made: list[int] = []
    with pytest.raises(RayLost):
        with RayThread() as ray:
            ray.lose("gone")
            await ray.finish(made.append, 1)
            with pytest.raises(RayLost, match="gone"):
                await ray.run(made.append, 2)

    assert made == []


async def test_cancelled_call_is_waited_for(release: threading.Event) -> None:
    with RayThread() as ray:
        call = asyncio.create_task(ray.run(release.wait))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.sleep(0.05)
        waited = not call.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await call

    assert waited


async def test_cancelled_call_that_hangs_is_given_up_in_time(release: threading.Event) -> None:
    with pytest.raises(RayLost, match=r"not answered for 0\.1 s"):
        with RayThread(patience=0.1) as ray:
            call = asyncio.create_task(ray.run(release.wait))
            await asyncio.sleep(0.05)
            call.cancel()
            async with asyncio.timeout(60):
                await asyncio.wait([call])


async def test_call_at_the_end_that_hangs_is_given_up_in_time(release: threading.Event) -> None:
    with pytest.raises(RayLost, match=r"not answered for 0\.1 s"):
        with RayThread(patience=0.1) as ray:
            async with asyncio.timeout(60):
                await ray.finish(release.wait)


async def test_who_waits_for_the_loss_hears_of_it() -> None:
    with pytest.raises(RayLost, match="gone"):
        with RayThread() as ray:
            waiting = asyncio.create_task(ray.wait_until_lost())
            await asyncio.sleep(0)
            ray.lose("gone")
            async with asyncio.timeout(60):
                await waiting


async def test_server_that_dies_is_noticed() -> None:
    reasons: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as stays:
        dies = socket.create_server(("127.0.0.1", 0))
        servers = {"gcs_server": stays.getsockname()[:2], "raylet": dies.getsockname()[:2]}
        watching = asyncio.create_task(watch(servers, reasons.append, period=0.01))
        await asyncio.sleep(0.2)
        before = list(reasons)
        dies.close()
        async with asyncio.timeout(60):
            await watching

    port = servers["raylet"][1]
    assert (before, reasons) == ([], [f"Ray's raylet at 127.0.0.1:{port} is gone"])


async def test_a_process_without_files_of_its_own_does_not_take_a_server_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reasons: list[str] = []
    errors = [OSError(errno.EMFILE, "Too many open files"), ConnectionRefusedError(111, "refused")]
    monkeypatch.setattr("asyncio.open_connection", AsyncMock(side_effect=list(errors)))

    await watch({"raylet": ("127.0.0.1", 7)}, reasons.append, period=0)

    assert asyncio.open_connection.await_count == 2
    assert reasons == ["Ray's raylet at 127.0.0.1:7 is gone"]
