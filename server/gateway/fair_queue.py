"""The calls that wait at the gateway, and which of them is next."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Waiting:
    """A call that waits for its turn."""

    tenant: str
    priority: int  # lower goes earlier
    turn: asyncio.Event = field(default_factory=asyncio.Event)  # for its caller; not touched here


class FairQueue:
    """Orders calls by priority, then fairly between tenants, then by arrival.

    The tenant of a priority with the fewest calls under way is next, among equals the one that has
    been so for longest. So tenants have equal shares of what the workers do at once,
    however many calls each of them sends and however long those take.

    One thread changes it. Any thread may ask about where a call would stand: it may see one change
    of several that belong together.
    """

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()  # calls, by tenant
        self._waiting: Counter[str] = Counter()  # the same
        self._classes: dict[int, _PriorityClass] = {}  # those in which somebody waits
        self._size = 0
        self.num_contending = 0  # calls under way of tenants that have others waiting

    def __len__(self) -> int:
        return self._size

    def add(self, waiting: Waiting) -> None:
        """Enqueue a call."""
        one_class = self._classes.setdefault(waiting.priority, _PriorityClass())
        if waiting.tenant not in one_class.lines:
            one_class.lines[waiting.tenant] = OrderedDict()
            one_class.rank(waiting.tenant, self._under_way[waiting.tenant])
        one_class.lines[waiting.tenant][waiting] = None
        one_class.size += 1
        self._size += 1
        if not self._waiting[waiting.tenant]:
            self.num_contending += self._under_way[waiting.tenant]
        self._waiting[waiting.tenant] += 1

    def remove(self, waiting: Waiting) -> None:
        """Remove a call that was not taken."""
        one_class = self._classes[waiting.priority]
        del one_class.lines[waiting.tenant][waiting]
        one_class.size -= 1
        self._size -= 1
        self._waiting[waiting.tenant] -= 1
        if not self._waiting[waiting.tenant]:
            del self._waiting[waiting.tenant]
            self.num_contending -= self._under_way[waiting.tenant]
        if not one_class.lines[waiting.tenant]:
            one_class.unrank(waiting.tenant)
            del one_class.lines[waiting.tenant]
        if not one_class.lines:
            del self._classes[waiting.priority]

    def take(self) -> Waiting | None:
        """Take the next call, which is under way until `done`; None if none waits."""
        if not self._classes:
            return None
        one_class = self._classes[min(self._classes)]
        waiting = next(iter(one_class.lines[one_class.next_tenant()]))
        self.remove(waiting)
        self.begin(waiting.tenant)
        return waiting

    def begin(self, tenant: str) -> None:
        """Count a call that did not have to wait as under way."""
        self._under_way[tenant] += 1
        self._follow(tenant, 1)

    def done(self, tenant: str) -> None:
        """Count a call that was under way as ended."""
        self._under_way[tenant] -= 1
        if not self._under_way[tenant]:
            del self._under_way[tenant]
        self._follow(tenant, -1)

    def has_under_way(self, tenant: str) -> bool:
        """Return whether a call of this tenant is under way."""
        return tenant in self._under_way

    def has_waiting(self, tenant: str) -> bool:
        """Return whether a call of this tenant waits."""
        return tenant in self._waiting

    def may_overtake(self, tenant: str, priority: int, num_slots: int) -> bool:
        """Return whether a call that is added now need not wait behind others for a free place.

        It must be as urgent as those, and its tenant below its share of the slots.
        """
        if not self._classes:
            return True
        share = max(1, num_slots // (len(self._waiting) + 1))
        is_urgent = priority <= min(self._classes, default=priority)
        return is_urgent and tenant not in self._waiting and self._under_way[tenant] < share

    def num_before(self, tenant: str, priority: int) -> int:
        """Return about how many waiting calls go before one that would be added now.

        Those of higher priorities; of its own, its tenant's and as many of every other tenant.
        """
        before = 0
        for other, one in tuple(self._classes.items()):
            if other < priority:
                before += one.size
        if (own := self._classes.get(priority)) is not None:
            num_own = len(own.lines.get(tenant, ()))
            before += min(own.size, num_own * max(1, len(own.lines)) + len(own.lines) - 1)
        return before

    def _follow(self, tenant: str, change: int) -> None:
        if tenant not in self._waiting:
            return
        self.num_contending += change
        for one_class in self._classes.values():
            if tenant in one_class.lines:
                one_class.rank(tenant, self._under_way[tenant])


@dataclass(eq=False, slots=True)
class _PriorityClass:
    """The waiting calls of one priority: a line for each tenant."""

    lines: dict[str, OrderedDict[Waiting, None]] = field(default_factory=dict)
    size: int = 0
    _ranks: dict[int, OrderedDict[str, None]] = field(default_factory=dict)  # by calls under way
    _rank_of: dict[str, int] = field(default_factory=dict)

    def next_tenant(self) -> str:
        return next(iter(self._ranks[min(self._ranks)]))

    def rank(self, tenant: str, num_under_way: int) -> None:
        if tenant in self._rank_of:
            self.unrank(tenant)
        self._rank_of[tenant] = num_under_way
        self._ranks.setdefault(num_under_way, OrderedDict())[tenant] = None

    def unrank(self, tenant: str) -> None:
        rank = self._rank_of.pop(tenant)
        del self._ranks[rank][tenant]
        if not self._ranks[rank]:
            del self._ranks[rank]
