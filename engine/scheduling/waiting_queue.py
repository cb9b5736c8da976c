"""The requests that wait for a place in the batch, and which of them is next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.scheduling.sequence import Request

_MAX_IDLE_ACCOUNTS = 1024  # tenants without a request; those idle longest are forgotten first


class WaitingQueue:
    """Orders requests by priority, then fairly between tenants, then by arrival.

    The tenant of a priority whose requests were given the fewest tokens is next: deficit round
    robin with the smallest quantum. A tenant is charged the most that a request may cost when it is
    taken, and its real cost when it ends. A tenant that comes back after a pause starts level with
    those that waited: it has saved nothing up.

    A group of sequences that was once the next of its priority stays so until it is taken or
    removed: else single requests could take all room that becomes free, and it would wait for
    ever for several at once.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._classes: dict[int, _PriorityClass] = {}  # those in which somebody waits
        self._accounts: dict[str, _Account] = {}  # tenants with a request, waiting or running
        self._idle: OrderedDict[str, int] = OrderedDict()  # tokens that other tenants have used
        self._last_served = _Account()
        self.num_tokens = 0  # that the waiting requests may cost

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: int) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[Request]:
        """Give the requests in order of arrival."""
        return iter(self._requests.values())

    def get(self, key: int) -> Request | None:
        """Return a request that waits; None if it does not."""
        return self._requests.get(key)

    def put_back(self, request: Request) -> None:
        """Let a request that was taken wait again, before its tenant's others of its priority."""
        self.charge(request, 0)
        self.add(request)
        line = self._classes[request.asked.priority].lines[request.asked.tenant]
        line.move_to_end(request.key, last=False)

    def add(self, request: Request) -> None:
        """Let a request wait."""
        asked = request.asked
        one_class = self._classes.setdefault(asked.priority, _PriorityClass())
        account = self._open_account(asked.tenant)
        line = one_class.lines.get(asked.tenant)
        if line is None:
            account.used = max(account.used, self._level(one_class))
            line = one_class.lines[asked.tenant] = OrderedDict()
        line[request.key] = request
        self._requests[request.key] = request
        self.num_tokens += request.max_cost

    def head(self) -> Request | None:
        """Return the next request without taking it."""
        if not self._classes:
            return None
        one_class = self._classes[min(self._classes)]
        if one_class.held is not None:
            return one_class.held
        firsts = (next(iter(line.values())) for line in one_class.lines.values())
        head = min(firsts, key=self._turn)
        if head.num_unfinished > 1:
            one_class.held = head
        return head

    def pop(self) -> Request:
        """Take the next request; its tenant is charged until `charge`."""
        request = self.head()
        if request is None:
            raise IndexError("no request waits")
        self._forget(request)
        self._last_served = self._accounts[request.asked.tenant]
        self._last_served.charged += request.max_cost
        return request

    def num_sequences_before(self, request: Request) -> int:
        """Return how many waiting sequences go before a request that would be added now.

        Those of later arrivals are not known, and what running requests use may be less than they
        are charged.
        """
        priority, tenant = request.asked.priority, request.asked.tenant
        count = 0
        for other, one_class in self._classes.items():
            if other < priority:
                lines = one_class.lines.values()
                count += sum(one.num_unfinished for line in lines for one in line.values())
        if (own := self._classes.get(priority)) is not None:
            turn = max(self._given(tenant), 0 if tenant in own.lines else self._level(own))
            turn += sum(one.max_cost for one in own.lines.get(tenant, {}).values())
            count += sum(
                self._num_sequences_until(turn, self._given(other), line)
                for other, line in own.lines.items()
            )
        return count

    def _num_sequences_until(self, turn: int, given: int, line: OrderedDict[int, Request]) -> int:
        """Return how many sequences of a line are taken before a request whose turn that is."""
        count = 0
        for one in line.values():
            if given > turn:
                break
            count += one.num_unfinished
            given += one.max_cost
        return count

    def remove(self, key: int) -> Request | None:
        """Let a request go that was not taken; None if it does not wait here."""
        request = self._requests.get(key)
        if request is not None:
            self._forget(request)
            self._close_account(request.asked.tenant)
        return request

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge a request that was taken and has ended for what it used, no more."""
        account = self._accounts[request.asked.tenant]
        account.charged -= request.max_cost
        account.used += num_tokens
        self._close_account(request.asked.tenant)

    def _turn(self, request: Request) -> tuple[int, int]:
        return self._given(request.asked.tenant), request.key

    def _given(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        if account is None:
            return self._idle.get(tenant, 0)
        return account.used + account.charged

    def _level(self, one_class: _PriorityClass) -> int:
        """Return the tokens from which a tenant starts that did not wait before."""
        waiting = [self._accounts[tenant].used for tenant in one_class.lines]
        return min(waiting, default=self._last_served.used)

    def _forget(self, request: Request) -> None:
        asked = request.asked
        del self._requests[request.key]
        self.num_tokens -= request.max_cost
        one_class = self._classes[asked.priority]
        if one_class.held is request:
            one_class.held = None
        line = one_class.lines[asked.tenant]
        del line[request.key]
        if not line:
            del one_class.lines[asked.tenant]
        if not one_class.lines:
            del self._classes[asked.priority]

    def _open_account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._idle.pop(tenant, 0))
        account.num_requests += 1
        return account

    def _close_account(self, tenant: str) -> None:
        account = self._accounts[tenant]
        account.num_requests -= 1
        if account.num_requests > 0:
            return
        del self._accounts[tenant]
        self._idle[tenant] = account.used
        if len(self._idle) > _MAX_IDLE_ACCOUNTS:
            self._idle.popitem(last=False)


@dataclass(slots=True, eq=False)
class _Account:
    """The tokens that a tenant was given; only differences between tenants mean something."""

    used: int = 0  # tokens of requests that have ended
    charged: int = 0  # the most that the running ones may cost
    num_requests: int = 0  # waiting or running


@dataclass(slots=True, eq=False)
class _PriorityClass:
    """The requests of one priority: a line for each tenant."""

    lines: dict[str, OrderedDict[int, Request]] = field(default_factory=dict)
    held: Request | None = None  # a group that was next once
