"""The order in which waiting calls are taken; nothing here depends on time."""

from __future__ import annotations

import threading

from server.gateway.fair_queue import FairQueue, Waiting


def _add(queue: FairQueue, tenant: str, count: int = 1, priority: int = 0) -> list[Waiting]:
    calls = [Waiting(tenant, priority) for _ in range(count)]
    for call in calls:
        queue.add(call)
    return calls


def _taken(queue: FairQueue, count: int) -> str:
    taken = [queue.take() for _ in range(count)]
    return "".join(call.tenant if call else "-" for call in taken)


def test_calls_of_one_tenant_are_taken_in_order_of_arrival() -> None:
    queue = FairQueue()
    calls = _add(queue, "a", 3)

    assert [queue.take() for _ in range(4)] == [*calls, None]


def test_a_tenant_behind_three_hundred_calls_of_another_is_next() -> None:
    queue = FairQueue()
    _add(queue, "a", 300)
    assert _taken(queue, 4) == "aaaa"

    _add(queue, "b")

    assert _taken(queue, 2) == "ba"


def test_slots_that_become_free_go_to_the_tenant_with_the_fewest() -> None:
    queue = FairQueue()
    for tenant in "abc":
        _add(queue, tenant, 9)
    assert _taken(queue, 6) == "abcabc"

    queue.done("b")
    queue.done("b")
    queue.done("c")

    assert _taken(queue, 3) == "bcb"


def test_calls_that_did_not_have_to_wait_count_too() -> None:
    queue = FairQueue()
    queue.begin("a")
    _add(queue, "a", 2)
    _add(queue, "b", 2)

    assert _taken(queue, 4) == "baba"


def test_a_lower_priority_number_goes_first_whoever_sends_it() -> None:
    queue = FairQueue()
    _add(queue, "a", 2)
    _add(queue, "b", 1, priority=1)
    _add(queue, "a", 1, priority=-1)

    assert [call.priority for call in [queue.take() for _ in range(4)] if call] == [-1, 0, 0, 1]


def test_a_call_that_went_away_is_not_taken() -> None:
    queue = FairQueue()
    first, second = _add(queue, "a", 2)
    (other,) = _add(queue, "b")

    queue.remove(first)
    queue.remove(other)

    assert [queue.take(), queue.take()] == [second, None]
    assert len(queue) == 0


def test_nothing_is_kept_of_tenants_that_have_left() -> None:
    queue = FairQueue()
    for i in range(100):
        _add(queue, f"tenant {i}")
    while (call := queue.take()) is not None:
        queue.done(call.tenant)

    assert not queue._under_way
    assert not queue._classes


def test_how_many_go_before_a_new_call_is_known() -> None:
    queue = FairQueue()
    _add(queue, "a", 10)
    _add(queue, "b", 2)
    _add(queue, "c", 3, priority=-1)

    assert queue.num_before("new", 0) == 3 + 1  # those of c, and one of a or b
    assert queue.num_before("a", 0) == 3 + 12
    assert queue.num_before("b", 0) == 3 + 2 * 2 + 1
    assert queue.num_before("c", -1) == 3
    assert queue.num_before("c", -2) == 0


def test_other_threads_may_ask_while_calls_come_and_go() -> None:
    queue = FairQueue()
    errors: list[BaseException] = []
    is_over = threading.Event()

    def ask() -> None:
        try:
            while not is_over.is_set():
                queue.num_before("a", 500)
                queue.may_overtake("a", 0, 8)
        except BaseException as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    for i in range(2_000):
        calls = [Waiting(f"{i}", priority) for priority in range(i % 50)]
        for call in calls:
            queue.add(call)
        for call in calls:
            queue.remove(call)
    is_over.set()
    asking.join()

    assert not errors
