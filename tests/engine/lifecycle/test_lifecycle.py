"""The lifecycle of an engine: states, refusals, health, drain and end, without any engine."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable

import pytest

from engine.errors import Draining, EngineFailure, ReplicaLost, Starting, TokenweirError
from engine.lifecycle.lifecycle import EngineState, WarmUpResult
from engine.lifecycle.thread_lifecycle import ThreadLifecycle


class Work:
    """Serves until it is ended; what fails is written down."""

    def __init__(self) -> None:
        self.ended, self.failed = threading.Event(), asyncio.Event()
        self.errors: list[TokenweirError] = []
        self.order: list[str] = []

    def serve(self) -> None:
        assert self.ended.wait(60)

    def die(self) -> None:
        raise RuntimeError("a bug")

    async def idle(self) -> None:
        self.order.append("idle")

    def end(self) -> None:
        self.order.append("end")
        self.ended.set()

    def fail_open(self, error_of: Callable[[str], TokenweirError]) -> None:
        self.errors.append(error_of("r-1"))
        self.failed.set()


def lifecycle(
    warm_up: Callable[[], WarmUpResult] = WarmUpResult,
    *,
    max_step_seconds: float = 8.0,
    niceness: int = 0,
) -> ThreadLifecycle:
    return ThreadLifecycle("tiny", "engine", warm_up, max_step_seconds, niceness=niceness)


async def test_a_life_goes_from_new_to_stopped_and_refuses_but_in_between() -> None:
    one, work = lifecycle(), Work()
    with pytest.raises(Starting):
        one.refuse_if_closed()
    assert one.is_warming and not one.healthy

    await one.start(work.serve, work.fail_open)
    one.refuse_if_closed()
    assert one.state is EngineState.RUNNING and one.healthy and not one.is_warming

    await one.stop(5, work.idle, work.end)
    with pytest.raises(Draining):
        one.refuse_if_closed()
    assert one.state is EngineState.STOPPED and not one.healthy
    assert work.order == ["idle", "end"]


async def test_a_life_begins_once() -> None:
    one, work = lifecycle(), Work()
    await one.start(work.serve, work.fail_open)

    with pytest.raises(RuntimeError, match="starts once; this one is running"):
        await one.start(work.serve, work.fail_open)

    await one.stop(0, work.idle, work.end)
    assert work.order == ["end"]  # no grace: nobody waits


async def test_requests_that_stay_open_are_waited_for_no_longer_than_the_grace() -> None:
    one, work = lifecycle(), Work()
    await one.start(work.serve, work.fail_open)
    states: list[EngineState] = []

    async def never() -> None:
        states.append(one.state)
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        await one.stop(0.01, never, work.end)

    assert states == [EngineState.DRAINING]
    assert work.ended.is_set()


async def test_a_thread_that_dies_fails_what_is_open_and_the_engine_is_lost() -> None:
    one, work = lifecycle(), Work()

    await one.start(work.die, work.fail_open)
    async with asyncio.timeout(60):
        await work.failed.wait()

    assert [type(error) for error in work.errors] == [EngineFailure] and "r-1" in str(work.errors)
    assert one.state is EngineState.FAILED and not one.healthy
    with pytest.raises(ReplicaLost):
        one.refuse_if_closed()
    await one.stop(5, work.idle, work.end)


async def test_a_step_that_takes_too_long_loses_what_is_open() -> None:
    one, work = lifecycle(max_step_seconds=0.1), Work()

    def hang() -> None:
        with one.step():
            work.serve()

    await one.start(hang, work.fail_open)
    async with asyncio.timeout(60):
        await work.failed.wait()

    assert [type(error) for error in work.errors] == [ReplicaLost]
    assert one.state is EngineState.FAILED and not one.healthy
    await one.stop(5, work.idle, work.end)


async def test_three_failed_steps_in_a_row_are_not_healthy_until_one_works() -> None:
    one, work, health = lifecycle(), Work(), []
    await one.start(work.serve, work.fail_open)

    for _ in range(3):
        with pytest.raises(ZeroDivisionError), one.step():
            raise ZeroDivisionError
        health.append(one.healthy)
    with one.step():
        pass

    assert health == [True, True, False] and one.healthy
    await one.stop(0, work.idle, work.end)


async def test_a_model_that_fails_in_its_trial_is_never_served() -> None:
    def fail() -> WarmUpResult:
        raise ZeroDivisionError

    one, work = lifecycle(fail), Work()

    with pytest.raises(ZeroDivisionError):
        await one.start(work.die, work.fail_open)

    assert not one.healthy and not one.is_invariant and work.errors == []
    await one.stop(0, work.idle, work.end)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
@pytest.mark.parametrize("niceness", [0, 5])
async def test_the_thread_is_as_nice_to_the_event_loop_as_it_is_told(niceness: int) -> None:
    nice: list[int] = []

    def warm_up() -> WarmUpResult:
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return WarmUpResult()

    one, work = lifecycle(warm_up, niceness=niceness), Work()
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    await one.start(work.serve, work.fail_open)
    await one.stop(0, work.idle, work.end)

    assert nice == [before + niceness]
    assert before == os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
