"""The waiting queue against a plain list, and the shares of tenants over a long time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.requests.request import SamplingParams
from engine.sampling.stop_rule import StopRule
from engine.scheduling.sequence import Request, Sequence, TokenRequest
from engine.scheduling.waiting_queue import WaitingQueue

RULE = StopRule(SamplingParams(), frozenset(), 1)


def request(
    key: int, *, tenant: str = "", priority: int = 0, cost: int = 10, size: int = 1
) -> Request:
    source = TokenRequest(
        key, f"r-{key}", (), SamplingParams(), 0, 0.0, priority=priority, tenant=tenant
    )
    made = Request(source, RULE, max_cost=cost)
    made.sequences = [Sequence(made, index, []) for index in range(size)]
    return made


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for one in requests:
        queue.add(one)
    return queue


def taken(queue: WaitingQueue) -> list[int]:
    """Take all requests, none of which ends meanwhile."""
    return [queue.pop().key for _ in range(len(queue))]


def test_a_lower_priority_value_goes_first_and_equal_ones_by_arrival() -> None:
    queue = queue_of(
        request(1, priority=5), request(2), request(3, priority=-1), request(4), request(5)
    )

    assert taken(queue) == [3, 2, 4, 5, 1]


def test_tenants_of_a_priority_take_turns_by_tokens_not_by_requests() -> None:
    large = [request(key, tenant="large", cost=30) for key in range(3)]
    small = [request(key, tenant="small", cost=10) for key in range(10, 19)]

    order = taken(queue_of(*large, *small))

    assert order == [0, 10, 11, 12, 1, 13, 14, 15, 2, 16, 17, 18]


def test_what_a_request_did_not_use_is_given_back_to_its_tenant() -> None:
    queue = queue_of(*(request(key, tenant="a", cost=100) for key in range(3)))
    for key in range(10, 13):
        queue.add(request(key, tenant="b", cost=100))

    first = queue.pop()
    queue.charge(first, 5)
    second, third = queue.pop(), queue.pop()

    assert [first.key, second.key, third.key] == [0, 10, 1]


def test_a_newcomer_is_not_measured_by_charges_that_are_given_back() -> None:
    queue = queue_of(*(request(key, tenant="brief", cost=1000) for key in range(4)))
    running = [queue.pop(), queue.pop()]

    queue.add(request(9, tenant="newcomer"))
    for one in running:
        queue.charge(one, 10)

    assert queue.pop().key == 9


def test_a_tenant_that_paused_has_not_saved_anything_up() -> None:
    queue = queue_of(request(1, tenant="sleeper"))
    queue.charge(queue.pop(), 10)
    for key in range(10, 14):
        queue.add(request(key, tenant="worker"))
        queue.charge(queue.pop(), 10)
    for key in range(20, 23):
        queue.add(request(key, tenant="worker"))
    for key in range(30, 33):
        queue.add(request(key, tenant="sleeper"))

    assert taken(queue) == [20, 30, 21, 31, 22, 32]


def test_a_group_that_is_next_stays_next_whoever_of_its_priority_comes() -> None:
    queue = queue_of(request(1, tenant="group", cost=500))
    queue.pop()
    queue.add(request(2, tenant="group", cost=500, size=4))
    head = queue.head()
    for key in range(3, 8):
        queue.add(request(key, tenant=f"newcomer {key}", cost=1))
        assert queue.head() is head

    assert queue.pop() is head


def test_a_higher_priority_still_goes_before_a_group_that_is_next() -> None:
    queue = queue_of(request(1, size=2))
    queue.head()
    queue.add(request(2, priority=-1))

    assert taken(queue) == [2, 1]


def test_the_accounts_of_tenants_that_never_come_back_are_forgotten() -> None:
    queue = WaitingQueue()
    for key in range(3000):
        queue.add(request(key, tenant=f"tenant {key}"))
        queue.charge(queue.pop(), 10)

    assert len(queue._accounts) == 0
    assert len(queue._idle) == 1024


described = st.tuples(st.sampled_from("abc"), st.integers(1, 50))


@settings(max_examples=200)
@given(st.lists(described, min_size=1, max_size=15), described, st.integers(0, 5))
def test_the_number_of_those_before_a_new_request_is_how_many_are_taken_before_it(
    earlier: list[tuple[str, int]], new: tuple[str, int], num_taken: int
) -> None:
    queue = WaitingQueue()
    for key, (tenant, cost) in enumerate([*earlier, new]):
        if key == len(earlier):
            for _ in range(min(num_taken, len(queue))):
                queue.pop()
            last = request(key, tenant=tenant, cost=cost)
            expected = queue.num_sequences_before(last)
        queue.add(request(key, tenant=tenant, cost=cost))

    assert taken(queue).index(len(earlier)) == expected


def test_those_of_a_higher_priority_are_before_a_new_request_with_all_their_sequences() -> None:
    queue = queue_of(request(1, size=3), request(2), request(3, priority=2, size=5))

    assert queue.num_sequences_before(request(4, priority=1)) == 4


def jain(shares: list[int]) -> float:
    """Jain's index of fairness: 1 if all are equal, 1/n if one has everything."""
    return float(sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)))


@pytest.mark.parametrize("seed", range(5))
def test_four_tenants_of_very_unequal_demand_get_equal_tokens_while_all_wait(seed: int) -> None:
    """Eight slots; demand in requests as 1 to 27, costs as 1 to 40, and much less used than asked.

    A tenant's backlog is filled up whenever it falls below its demand, so that all wait always.
    """
    draw = random.Random(seed)
    tenants = {"a": (3, 800), "b": (9, 200), "c": (27, 60), "d": (81, 20)}  # backlog, mean cost
    queue, served = WaitingQueue(), dict.fromkeys(tenants, 0)
    backlog, key = dict.fromkeys(tenants, 0), 0
    running: list[tuple[Request, int]] = []
    for _ in range(4000):
        for tenant, (demand, cost) in tenants.items():
            while backlog[tenant] < demand:
                key += 1
                backlog[tenant] += 1
                queue.add(request(key, tenant=tenant, cost=draw.randint(cost // 2, 3 * cost // 2)))
        if len(running) == 8:
            ended, used = running.pop(draw.randrange(8))
            queue.charge(ended, used)
            served[ended.asked.tenant] += used
        admitted = queue.pop()
        backlog[admitted.asked.tenant] -= 1
        running.append((admitted, max(1, round(admitted.max_cost * draw.random()))))

    assert jain(list(served.values())) >= 0.95


class QueueMachine(RuleBasedStateMachine):
    """The model: lists of what waits and what runs, and the tokens that each tenant has used."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.used: dict[str, int] = {}
        self.held: dict[int, Request] = {}
        self.last_served: str | None = None
        self.count = 0

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.integers(0, 2),
        cost=st.integers(1, 50),
        size=st.integers(1, 2),
    )
    def add(self, tenant: str, priority: int, cost: int, size: int) -> None:
        self.count += 1
        new = request(self.count, tenant=tenant, priority=priority, cost=cost, size=size)
        peers = {r.asked.tenant for r in self.waiting if r.asked.priority == priority}
        if tenant not in peers:
            last = 0 if self.last_served is None else self.used[self.last_served]
            level = min((self.used[peer] for peer in peers), default=last)
            self.used[tenant] = max(self.used.get(tenant, 0), level)
        self.waiting.append(new)
        self.queue.add(new)

    @precondition(lambda self: self.waiting)
    @rule()
    def look(self) -> None:
        assert self.queue.head() is self.expected_head()

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        expected = self.expected_head()
        assert self.queue.pop() is expected
        self.drop(expected)
        self.last_served = expected.asked.tenant
        self.running.append(expected)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(gone.key) is gone
        assert self.queue.remove(gone.key) is None
        self.drop(gone)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def charge(self, data: st.DataObject) -> None:
        ended = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        used = data.draw(st.integers(0, ended.max_cost))
        self.queue.charge(ended, used)
        self.used[ended.asked.tenant] += used

    @invariant()
    def holds_what_was_added_and_not_taken(self) -> None:
        assert list(self.queue) == self.waiting and len(self.queue) == len(self.waiting)
        assert all(one.key in self.queue for one in self.waiting)
        assert self.queue.num_tokens == sum(one.max_cost for one in self.waiting)
        assert self.waiting or self.queue.head() is None

    def expected_head(self) -> Request:
        priority = min(one.asked.priority for one in self.waiting)
        if priority in self.held:
            return self.held[priority]
        peers = [one for one in self.waiting if one.asked.priority == priority]
        head = min(peers, key=lambda one: (self.given_to(one.asked.tenant), one.key))
        if len(head.sequences) > 1:
            self.held[priority] = head
        return head

    def given_to(self, tenant: str) -> int:
        return self.used[tenant] + sum(
            one.max_cost for one in self.running if one.asked.tenant == tenant
        )

    def drop(self, one: Request) -> None:
        self.waiting.remove(one)
        if self.held.get(one.asked.priority) is one:
            del self.held[one.asked.priority]


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(stateful_step_count=40)
