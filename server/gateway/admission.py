"""Which calls the gateway hands to its workers at once, which wait for it, which it refuses."""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engine.errors import CannotMeet, ExpiredInQueue, TokenweirError
from engine.metrics import DrainMeter
from server.gateway.fair_queue import FairQueue, Waiting
from server.gateway.request_head import RequestHead

_LEAST_RETRY = 0.1  # seconds
_NUM_OWN_TIMES = 64  # calls of late, of which half were as fast as one is given credit for
_REMEMBERED = 10.0  # seconds after its last call that a tenant is still there
# The wait that is foretold is about right, and late calls cost others their time: so it is taken
# for longer, more so after every call that had its turn and was late, less after one in time. With
# these steps one of 160 is late, where what a call takes cannot be told better. A shorter queue
# serves as many as long as it does not run empty: when it does, half of the caution was too much.
_CAUTION, _MOST_CAUTION = 1.15, 2.5
_CAUTION_IF_LATE, _TRUST_IF_IN_TIME, _KEPT_IF_EMPTY = 0.08, 0.0005, 0.5
_LATE = 0.05  # seconds before its deadline: a call that fails later had too little time
_MARGIN = 0.02  # seconds before its deadline in which a call can be told that it has expired

_LEAST_COUNT = 16  # calls, below which the drain is not known
_NUM_METERS, _TIMES = 4, 4  # each measures over so many times as many calls as the one before
_LOOK_AHEAD = 16  # times a meter's least count that is foretold by it, or by the longest


class Admission:
    """Hands out so many slots at once, in fair order; a call without one waits here.

    Workers and the gateway itself serve in order of arrival: a call that stands behind hundreds
    there cannot overtake them. So only as many as keep the workers busy are handed over, and the
    others wait where the order is fair. A call that would come too late is refused at once, for
    work on it would be lost, and the time of others with it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_slots: int | None = None  # None: as many as there are calls
        self._num_contended: int | None = None  # those of tenants that have calls waiting
        self._satisfied: OrderedDict[str, float] = OrderedDict()  # tenants without, when last seen
        self._num_under_way = 0
        self._queue = FairQueue()
        self._lock = threading.Lock()  # guards the calls that are coming
        self._coming: Counter[tuple[str, int]] = Counter()  # by tenant and priority
        self._drain = Drain()
        self._own_times: deque[float] = deque()
        self._sorted_times: list[float] = []  # the same
        self._own_time = 0.0  # seconds that a call may be hoped to take from its turn
        self._caution = _CAUTION
        self._refusal: TokenweirError | None = None

    def set_slots(self, num_slots: int | None, num_contended: int | None = None) -> None:
        """Limit the calls in flight to so many; None: no limit.

        Only `num_contended` of them are of tenants that have calls waiting, while another tenant
        has none. That one sends less than its share, and a flood must not slow it down.
        Tenants that all wait want whole batches instead.
        """
        self._num_slots = num_slots
        self._num_contended = num_slots if num_contended is None else num_contended
        self._hand_out()

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait for their turn."""
        return len(self._queue)

    def refuse_waiting(self, error: TokenweirError) -> None:
        """End every call that waits, or will."""
        self._refusal = error
        self.set_slots(None)

    @asynccontextmanager
    async def slot(self, head: RequestHead, time_left: float | None) -> AsyncIterator[None]:
        """Wait for a call's turn, and keep its slot to the end of the block.

        Raises CannotMeet if it would end after its deadline, ExpiredInQueue if that passes here,
        and what `refuse_waiting` was given.
        """
        deadline = None if time_left is None else self._clock() + time_left
        if self._refusal is not None:
            raise self._refusal
        if self._has_free_slot(head):
            self._num_under_way += 1
            self._queue.begin(head.tenant)
            self._note(head.tenant)
        else:
            self._judge(head, deadline)
            await self._turn(Waiting(head.tenant, head.priority), deadline)
        started = self._clock()
        try:
            yield
        except BaseException:
            if deadline is not None and self._clock() > deadline - _LATE:
                self._caution = min(_MOST_CAUTION, self._caution + _CAUTION_IF_LATE)
            raise
        else:
            self._note_own_time(self._clock() - started)
        finally:
            self._leave(head.tenant)

    async def _turn(self, waiting: Waiting, deadline: float | None) -> None:
        self._queue.add(waiting)
        self._note(waiting.tenant)
        self._hand_out()
        try:
            async with asyncio.timeout(
                None if deadline is None else max(0.0, deadline - self._clock() - _MARGIN)
            ):
                await waiting.turn.wait()
            if self._refusal is not None:
                raise self._refusal
            if deadline is not None and self._clock() + self._own_time > deadline:
                raise self._cannot_meet(0.0, deadline - self._clock())
        except BaseException as error:
            what = f"its deadline passed at the gateway, where {len(self._queue)} calls wait"
            if waiting.turn.is_set():
                self._leave(waiting.tenant)
            else:
                self._queue.remove(waiting)
                self._note(waiting.tenant)
                self._hand_out()
            if isinstance(error, TimeoutError):
                raise ExpiredInQueue(what) from None
            raise

    def refuse_if_too_late(self, head: RequestHead, time_left: float | None) -> None:
        """Raise CannotMeet if a call would end after its deadline: it need not ask for a turn.

        Any thread may ask.
        """
        if time_left is not None and not self._has_free_slot(head):
            num_coming = self._coming[head.tenant, head.priority]
            self._judge(head, self._clock() + time_left, num_coming)

    def expect(self, head: RequestHead) -> None:
        """Count a call as one that waits, until `has_come`; any thread may tell of it.

        Else all calls that come at the same moment would be let in by the same short queue, and
        most of them be refused on the event loop, where that costs several times as much.
        """
        with self._lock:
            self._coming[head.tenant, head.priority] += 1

    def has_come(self, head: RequestHead) -> None:
        """Count a call no more that was expected: it has asked for its turn, or never will."""
        key = head.tenant, head.priority
        with self._lock:
            self._coming[key] -= 1
            if not self._coming[key]:
                del self._coming[key]

    def _judge(self, head: RequestHead, deadline: float | None, num_coming: int = 0) -> None:
        if deadline is None:
            return
        num_before = self._queue.num_before(head.tenant, head.priority) + num_coming
        wait = self._drain.seconds(num_before + 1)
        if wait is None:
            return
        time_left = deadline - self._clock()
        if self._caution * wait + self._own_time > time_left:
            raise self._cannot_meet(wait, time_left)

    def _cannot_meet(self, wait: float, time_left: float) -> CannotMeet:
        retry_after = max(_LEAST_RETRY, wait + self._own_time - time_left)
        return CannotMeet(
            f"{len(self._queue)} calls wait at the gateway: this one would wait about "
            f"{wait:.3f} s and take {self._own_time:.3f} s, but its deadline is in "
            f"{time_left:.3f} s; retry in {retry_after:.1f} s, or allow more time",
            retry_after,
        )

    def _note_own_time(self, seconds: float) -> None:
        """Take in what a call took: of late, as how much the next one asks is not known."""
        self._caution = max(_CAUTION, self._caution - _TRUST_IF_IN_TIME)
        self._own_times.append(seconds)
        insort(self._sorted_times, seconds)
        if len(self._own_times) > _NUM_OWN_TIMES:
            del self._sorted_times[bisect_left(self._sorted_times, self._own_times.popleft())]
        self._own_time = self._sorted_times[len(self._sorted_times) // 2]

    def _has_free_slot(self, head: RequestHead) -> bool:
        if self._num_slots is None:
            return True
        is_free = self._num_under_way < self._num_slots
        return is_free and self._queue.may_overtake(head.tenant, head.priority, self._num_slots)

    def _note(self, tenant: str) -> None:
        """Note that a tenant is there; keep those that have no calls waiting, last seen last."""
        self._satisfied.pop(tenant, None)
        if not self._queue.has_waiting(tenant):
            self._satisfied[tenant] = self._clock()
        self._forget_who_has_left()

    @property
    def _has_room(self) -> bool:
        """Whether one of the calls that wait can go on."""
        if self._num_slots is None or self._num_contended is None:
            return True
        if self._num_under_way >= self._num_slots:
            return False
        self._forget_who_has_left()
        return self._queue.num_contending < self._num_contended or not self._satisfied

    def _forget_who_has_left(self) -> None:
        now = self._clock()
        while self._satisfied:
            tenant, seen = next(iter(self._satisfied.items()))
            if seen > now - _REMEMBERED:
                return
            del self._satisfied[tenant]
            if self._queue.has_under_way(tenant):
                self._satisfied[tenant] = now

    def _hand_out(self) -> None:
        num_given, was_waiting = 0, bool(self._queue)
        while self._has_room and (waiting := self._queue.take()) is not None:
            self._num_under_way += 1
            num_given += 1
            self._note(waiting.tenant)
            waiting.turn.set()
        self._drain.advance(self._clock(), num_given, bool(self._queue))
        if was_waiting and not self._queue:
            self._caution = _CAUTION + _KEPT_IF_EMPTY * (self._caution - _CAUTION)

    def _leave(self, tenant: str) -> None:
        self._num_under_way -= 1
        self._queue.done(tenant)
        self._note(tenant)
        self._hand_out()


class Drain:
    """Foretells a long queue by what many calls took, a short one by the last few.

    The last few tell best what the next ones take; but a moment in which little is done, as when
    thousands of calls come at once and are read, does not last as long as a long queue.
    """

    def __init__(self) -> None:
        self._meters = [DrainMeter(_LEAST_COUNT * _TIMES**i) for i in range(_NUM_METERS)]
        self._is_waiting = False

    def advance(self, now: float, num_given: int, is_waiting: bool) -> None:
        """Note how many calls had their turn since the last time, and if one still waits."""
        if not (is_waiting or self._is_waiting):
            return
        self._is_waiting = is_waiting
        for meter in self._meters:
            meter.advance(now, num_given, is_waiting)

    def seconds(self, num_calls: int) -> float | None:
        """Return how long so many calls will take to leave; None if that is not known yet."""
        rate, foretold = None, _LOOK_AHEAD * _LEAST_COUNT
        for meter in self._meters:
            rate = meter.rate or rate
            if num_calls <= foretold:
                break
            foretold *= _TIMES
        return None if rate is None else num_calls / rate
