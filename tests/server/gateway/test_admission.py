"""Admission of calls at the gateway: waiting, turns, and refusals of those that would be late."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from engine.errors import CannotMeet, Draining, ExpiredInQueue
from server.gateway.admission import Admission
from server.gateway.request_head import RequestHead
from tests.fakes.clock import FakeClock


class Calls:
    """Calls that have asked for their turn, by name."""

    def __init__(self, admission: Admission) -> None:
        self.running: list[str] = []
        self.failed: dict[str, BaseException] = {}
        self._admission = admission
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, time_left: float | None = None, priority: int = 0) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, time_left, priority))
        await _settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await _settle()

    async def _run(self, name: str, time_left: float | None, priority: int) -> None:
        try:
            async with self._admission.slot(RequestHead(name[0], priority), time_left):
                self.running.append(name)
                await self._ends[name].wait()
                self.running.remove(name)
        except Exception as error:
            self.failed[name] = error


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_more_places_are_given_at_once_and_fewer_as_calls_end() -> None:
    admission = Admission()
    admission.set_slots(1)
    calls = Calls(admission)
    for name in "abcd":
        await calls.ask(name)

    admission.set_slots(3)
    await _settle()
    assert calls.running == ["a", "b", "c"]
    admission.set_slots(1)
    await calls.end("a")
    await calls.end("b")
    assert calls.running == ["c"]
    await calls.end("c")

    assert calls.running == ["d"]


async def _flooded(admission: Admission) -> Calls:
    """Return calls of which all eight places are a flood's, and twelve of it wait."""
    admission.set_slots(8, num_contended=2)
    calls = Calls(admission)
    for i in range(20):
        await calls.ask(f"flood {i}")
    assert len(calls.running) == 8
    return calls


async def test_beside_a_tenant_whose_calls_need_not_wait_a_flood_has_few_places() -> None:
    calls = await _flooded(Admission())
    await calls.ask("other 0")
    await calls.end("flood 0")
    assert "other 0" in calls.running

    for i in range(1, 7):
        await calls.end(f"flood {i}")
    assert calls.running == ["flood 7", "other 0", "flood 8"]
    await calls.end("other 0")
    await calls.ask("other 1")
    await calls.ask("other 2")

    assert calls.running == ["flood 7", "flood 8", "other 1", "other 2"]


async def test_a_flood_has_all_places_again_ten_seconds_after_the_last_call_of_others() -> None:
    clock = FakeClock()
    calls = await _flooded(Admission(clock=clock))
    await calls.ask("other")
    for i in range(7):
        await calls.end(f"flood {i}")
    clock.now += 11
    await calls.end("flood 7")
    assert calls.running == ["other", "flood 8", "flood 9"]  # for that call goes on

    await calls.end("other")
    clock.now += 11
    await calls.end("flood 8")

    assert calls.running == [f"flood {i}" for i in range(9, 17)]


async def test_tenants_that_all_wait_share_all_places() -> None:
    calls = await _flooded(Admission())
    for i in range(20):
        await calls.ask(f"second {i}")

    for i in range(8):
        await calls.end(f"flood {i}")

    assert sorted(calls.running) == [
        *("flood 10", "flood 11", "flood 8", "flood 9"),
        *("second 0", "second 1", "second 2", "second 3"),
    ]


async def test_a_tenant_overtakes_those_that_wait_up_to_its_share_of_all_places() -> None:
    calls = await _flooded(Admission())
    await calls.ask("other 0")
    for i in range(7):
        await calls.end(f"flood {i}")
    assert calls.running == ["flood 7", "other 0", "flood 8"]

    for i in range(1, 4):
        await calls.ask(f"other {i}")
    assert calls.running[3:] == ["other 1", "other 2", "other 3"]
    await calls.ask("other 4")

    assert calls.running[6:] == ["flood 9", "flood 10"]  # it waits like the flood: all places


async def test_a_tenant_does_not_overtake_those_that_are_more_urgent() -> None:
    calls = await _flooded(Admission())
    await calls.ask("other 0")
    for i in range(7):
        await calls.end(f"flood {i}")
    await calls.ask("low", priority=1)

    assert "low" not in calls.running


async def test_a_call_that_is_cancelled_leaves_its_place_or_its_turn() -> None:
    admission = Admission()
    admission.set_slots(1)
    calls = Calls(admission)
    for name in "abc":
        await calls.ask(name)

    calls.tasks["b"].cancel()
    calls.tasks["a"].cancel()
    await _settle()

    assert calls.running[-1] == "c"


async def test_a_turn_that_comes_while_the_call_is_cancelled_goes_to_the_next() -> None:
    admission = Admission()
    admission.set_slots(1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(admission.slot(RequestHead("a"), None))
        calls = Calls(admission)
        await calls.ask("b")
        await calls.ask("c")
        calls.tasks["b"].cancel()

    await _settle()
    assert calls.running == ["c"]


async def _measured(clock: FakeClock, num_calls: int = 100) -> tuple[Admission, Calls]:
    """Return an admission that has seen ten calls a second, of 0.1 s each, one at a time."""
    admission = Admission(clock=clock)
    admission.set_slots(1)
    calls = Calls(admission)
    for i in range(num_calls + 1):
        await calls.ask(f"a{i}")
    for i in range(num_calls):
        clock.now += 0.1
        await calls.end(f"a{i}")
    return admission, calls


async def test_a_call_that_would_come_too_late_is_refused_at_once() -> None:
    clock = FakeClock()
    _, calls = await _measured(clock)
    for i in range(4):
        await calls.ask(f"w{i}")  # 0.5 s until the next one's turn, 0.1 s for itself

    await calls.ask("w late", time_left=0.5)
    await calls.ask("w in time", time_left=0.7)

    refused = calls.failed["w late"]
    assert isinstance(refused, CannotMeet)
    assert refused.retry_after == pytest.approx(0.1, abs=0.02)
    assert "w in time" not in calls.failed


async def test_a_call_that_is_coming_counts_as_one_that_waits() -> None:
    admission, _ = await _measured(FakeClock())  # ten calls a second
    head, other = RequestHead("a"), RequestHead("b")

    num_let_in = 0
    with pytest.raises(CannotMeet):
        while num_let_in < 100:
            admission.refuse_if_too_late(head, 1.0)
            admission.expect(head)
            num_let_in += 1

    assert num_let_in == 7  # 0.7 s, a sixth more to be sure, and 0.1 s for itself
    admission.refuse_if_too_late(other, 1.0)
    for _ in range(num_let_in):
        admission.has_come(head)
    admission.refuse_if_too_late(head, 1.0)


async def test_a_wait_that_is_foretold_is_not_trusted_to_the_last_moment() -> None:
    _, calls = await _measured(FakeClock())
    for i in range(4):
        await calls.ask(f"w{i}")

    await calls.ask("w", time_left=0.65)  # 0.6 would do

    assert isinstance(calls.failed["w"], CannotMeet)


async def test_a_stall_does_not_keep_out_who_has_the_time_to_wait_for_its_end() -> None:
    clock = FakeClock()
    _, calls = await _measured(clock, num_calls=1000)
    for i in range(620):
        await calls.ask(f"w{i}")
    for ended in ("a1000", *(f"w{i}" for i in range(19))):
        clock.now += 5.0
        await calls.end(ended)

    await calls.ask("w in time", time_left=400.0)  # 600 calls are before it
    await calls.ask("w late", time_left=30.0)

    assert "w in time" not in calls.failed
    assert isinstance(calls.failed["w late"], CannotMeet)


async def test_a_queue_that_has_run_empty_was_kept_too_short() -> None:
    clock = FakeClock()
    _, calls = await _measured(clock)
    await calls.end("a100")
    for i in range(20):
        await calls.ask(f"lost {i}", time_left=1.0)
        clock.now += 1.0
        calls.tasks[f"lost {i}"].cancel()
        await _settle()
    assert not await _is_let_in(calls, "w cautious")

    for i in range(8):
        await calls.ask(f"a{i}")
        await calls.ask(f"b{i}")
        await calls.end(f"a{i}")
        await calls.end(f"b{i}")

    assert await _is_let_in(calls, "w again")


async def _is_let_in(calls: Calls, name: str) -> bool:
    """Return if a call with 0.8 s goes on waiting that would wait 0.5 s and take 0.1 s."""
    others = [f"w{i}" for i in range(5)]
    for other in others:
        await calls.ask(other)

    await calls.ask(name, time_left=0.8)

    for other in others:
        await calls.end(other)
    if name in calls.running:
        await calls.end(name)
    return name not in calls.failed


async def test_work_that_was_lost_teaches_caution_and_work_in_time_trust() -> None:
    clock = FakeClock()
    _, calls = await _measured(clock)
    await calls.end("a100")
    assert await _is_let_in(calls, "w before")

    for i in range(20):
        await calls.ask(f"lost {i}", time_left=1.0)
        clock.now += 1.0
        calls.tasks[f"lost {i}"].cancel()
        await _settle()
    assert not await _is_let_in(calls, "w cautious")
    for i in range(1000):
        await calls.ask(f"in time {i}", time_left=1.0)
        await calls.end(f"in time {i}")

    assert await _is_let_in(calls, "w again")


async def test_calls_that_end_long_before_their_deadline_teach_no_caution() -> None:
    _, calls = await _measured(FakeClock())
    await calls.end("a100")

    for i in range(20):
        await calls.ask(f"gone {i}", time_left=1.0)
        calls.tasks[f"gone {i}"].cancel()
        await _settle()

    assert await _is_let_in(calls, "w")


async def test_a_call_whose_turn_leaves_it_less_time_than_half_of_them_take_goes_no_further() -> (
    None
):
    clock = FakeClock()
    _, calls = await _measured(clock)
    for i in range(100, 133):
        await calls.ask(f"a{i + 1}")
        clock.now += 0.5
        await calls.end(f"a{i}")
    await calls.ask("b", time_left=20.0)
    await calls.ask("c")

    clock.now += 19.7
    await calls.end("a133")

    assert isinstance(calls.failed["b"], CannotMeet)
    assert calls.running == ["c"]


async def test_calls_that_take_long_do_not_keep_a_short_one_out() -> None:
    clock = FakeClock()
    _, calls = await _measured(clock)
    for i in range(100, 120):
        await calls.ask(f"a{i + 1}")
        clock.now += 5.0
        await calls.end(f"a{i}")
    await calls.ask("short", time_left=30.0)

    clock.now += 29.8
    await calls.end("a120")

    assert calls.running == ["short"]


async def test_without_a_queue_no_deadline_is_judged() -> None:
    _admission, calls = await _measured(FakeClock())
    await calls.end("a100")

    await calls.ask("short", time_left=0.001)

    assert calls.running == ["short"]


async def test_a_call_whose_time_has_run_out_when_its_turn_comes_goes_no_further() -> None:
    clock = FakeClock()
    _, calls = await _measured(clock)
    await calls.ask("b", time_left=0.3)
    await calls.ask("c")

    clock.now += 0.25
    await calls.end("a100")

    assert isinstance(calls.failed["b"], CannotMeet)
    assert calls.running == ["c"]


async def test_a_deadline_that_passes_in_the_queue_is_told() -> None:
    admission = Admission()
    admission.set_slots(1)
    calls = Calls(admission)
    await calls.ask("a")

    await calls.ask("b", time_left=0.0)
    await asyncio.wait([calls.tasks["b"]])

    assert isinstance(calls.failed["b"], ExpiredInQueue)


async def test_at_the_end_all_that_wait_are_refused() -> None:
    admission = Admission()
    admission.set_slots(1)
    calls = Calls(admission)
    for name in "abc":
        await calls.ask(name)

    admission.refuse_waiting(Draining("the end", 0.5))
    await calls.ask("d")

    assert {name: type(error) for name, error in calls.failed.items()} == dict.fromkeys(
        "bcd", Draining
    )


async def test_tenants_that_have_left_are_forgotten() -> None:
    clock = FakeClock()
    admission = Admission(clock=clock)
    admission.set_slots(2)

    for number in range(1000):
        async with admission.slot(RequestHead(f"tenant {number}"), None):
            clock.now += 1.0

    assert len(admission._satisfied) < 20


async def test_a_tenant_whose_call_is_long_is_still_there() -> None:
    clock = FakeClock()
    admission = Admission(clock=clock)
    admission.set_slots(2)

    async with admission.slot(RequestHead("long"), None):
        for number in range(100):
            async with admission.slot(RequestHead(f"tenant {number}"), None):
                clock.now += 1.0

        assert "long" in admission._satisfied
