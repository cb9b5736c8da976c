"""Signals that end a command: which do, and when they no longer wait."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from server.signals import cancelled_by_signals


@pytest.fixture
def handler_of_sighup() -> Iterator[None]:
    """Put back what was there."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_signal_cancels_and_is_told(number: signal.Signals) -> None:
    with cancelled_by_signals() as seen:
        os.kill(os.getpid(), number)
        await asyncio.sleep(10)
        pytest.fail("it was not cancelled")

    assert seen == [number]


async def test_another_cancellation_goes_on() -> None:
    async def work() -> None:
        with cancelled_by_signals():
            await asyncio.sleep(10)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.usefixtures("handler_of_sighup")
async def test_closed_terminal_is_ignored_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with cancelled_by_signals() as seen:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)

    assert seen == []
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
