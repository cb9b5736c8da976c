"""Which requests have passed their deadline."""

from __future__ import annotations

from engine.requests.request import SamplingParams
from engine.sampling.stop_rule import StopRule
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.sequence import Request, TokenRequest

RULE = StopRule(SamplingParams(), frozenset(), 1)


def requests_due_at(*deadlines: float | None) -> list[Request]:
    return [
        Request(TokenRequest(key, f"r-{key}", (), SamplingParams(), 0, 0.0, deadline), RULE)
        for key, deadline in enumerate(deadlines)
    ]


def watching(requests: list[Request]) -> Deadlines:
    deadlines = Deadlines()
    for request in requests:
        deadlines.add(request.asked.deadline)
    return deadlines


def test_a_request_has_expired_at_its_deadline_and_one_without_never() -> None:
    requests = requests_due_at(5.0, None, 3.0)
    deadlines = watching(requests)

    early, late = deadlines.expired(requests, 2.9), deadlines.expired(requests, 5.0)

    assert [request.key for request in early] == []
    assert [request.key for request in late] == [0, 2]


def test_later_deadlines_are_still_watched_when_one_has_passed() -> None:
    requests = requests_due_at(5.0, 3.0)
    deadlines = watching(requests)

    first = deadlines.expired(requests, 3.0)
    second = deadlines.expired(requests[:1], 5.0)

    assert (first, second) == ([requests[1]], [requests[0]])


def test_no_request_is_looked_at_before_the_earliest_deadline() -> None:
    requests = requests_due_at(5.0, 3.0)
    deadlines, unseen = watching(requests), iter(requests)

    expired = deadlines.expired(unseen, 2.9)

    assert expired == []
    assert next(unseen) is requests[0]
