"""Quotas: a tenant's requests at once and tokens in a minute, and when it may have more."""

from __future__ import annotations

import pytest

from engine.errors import TenantQuota
from server.auth.quotas import Quotas
from server.auth.tokens import Identity
from tests.fakes.clock import FakeClock


def refusal(quotas: Quotas, identity: Identity) -> TenantQuota:
    with pytest.raises(TenantQuota) as caught:
        quotas.acquire(identity)
    return caught.value


def test_a_tenant_has_no_more_requests_open_than_it_may() -> None:
    quotas, acme, other = (
        Quotas(FakeClock(0.0)),
        *(Identity(t, max_requests=2) for t in ("acme", "other")),
    )
    first, _ = quotas.acquire(acme), quotas.acquire(acme)

    refused = refusal(quotas, acme)
    quotas.acquire(other)
    quotas.release(first, 0)
    quotas.acquire(acme)

    assert (refused.tenant, refused.quota) == ("acme", "max_requests: 2")
    assert "has 2 requests open" in str(refused)


def test_it_is_told_how_often_one_of_its_requests_ends() -> None:
    clock = FakeClock(0.0)
    quotas, acme = Quotas(clock), Identity("acme", max_requests=4)
    for _ in range(20):
        leases = [quotas.acquire(acme) for _ in range(4)]
        clock.now += 2.0
        for lease in leases:
            quotas.release(lease, 0)
    for _ in range(4):
        quotas.acquire(acme)

    assert refusal(quotas, acme).retry_after == pytest.approx(0.5)


def test_requests_that_are_open_for_long_are_not_said_to_end_at_once() -> None:
    clock = FakeClock(0.0)
    quotas, acme = Quotas(clock), Identity("acme", max_requests=2)
    for _ in range(2):
        quotas.acquire(acme)

    at_first = refusal(quotas, acme)
    clock.now += 40.0
    later = refusal(quotas, acme)

    assert at_first.retry_after == pytest.approx(0.5)  # nothing is known of its requests
    assert later.retry_after == pytest.approx(20.0)
    assert "one ends in about 20.00 s" in str(later)


def test_one_request_that_is_long_hides_not_that_others_end() -> None:
    clock = FakeClock(0.0)
    quotas, acme = Quotas(clock), Identity("acme", max_requests=3)
    quotas.acquire(acme)
    for _ in range(50):
        leases = [quotas.acquire(acme) for _ in range(2)]
        clock.now += 2.0
        for lease in leases:
            quotas.release(lease, 0)
    for _ in range(2):
        quotas.acquire(acme)

    assert refusal(quotas, acme).retry_after == pytest.approx(1.0, rel=0.02)


def test_tokens_of_a_minute_come_back_when_it_was_said() -> None:
    clock = FakeClock(0.0)
    quotas, acme = Quotas(clock), Identity("acme", tokens_per_minute=600)
    quotas.release(quotas.acquire(acme), 900)

    refused = refusal(quotas, acme)
    clock.now += refused.retry_after - 0.01
    assert refusal(quotas, acme).retry_after == pytest.approx(0.05)  # no client comes sooner
    clock.now += 0.02
    quotas.acquire(acme)

    assert refused.retry_after == pytest.approx(30.0)  # 300 too many, 10 a second come back
    assert refused.quota == "tokens_per_minute: 600"


def test_calls_under_way_count_as_much_as_those_of_late_took() -> None:
    quotas, acme = Quotas(FakeClock(0.0)), Identity("acme", tokens_per_minute=600)
    quotas.release(quotas.acquire(acme), 200)

    leases = [quotas.acquire(acme) for _ in range(3)]  # 200 and 200 more each

    assert refusal(quotas, acme).retry_after == pytest.approx(20.0)
    for lease in leases:
        quotas.release(lease, 0)
    quotas.acquire(acme)


def test_who_has_no_quota_is_not_counted() -> None:
    quotas, acme = Quotas(FakeClock(0.0)), Identity("acme")

    for _ in range(100):
        quotas.acquire(acme)


def test_a_call_that_does_not_say_what_it_took_counts_as_those_of_late() -> None:
    quotas, acme = Quotas(FakeClock(0.0)), Identity("acme", tokens_per_minute=600)
    quotas.release(quotas.acquire(acme), 200)

    for _ in range(3):
        quotas.release(quotas.acquire(acme), None)

    assert refusal(quotas, acme).retry_after == pytest.approx(20.0)


def test_who_never_lets_a_call_end_has_a_quota_too() -> None:
    quotas, acme = Quotas(FakeClock(0.0)), Identity("acme", tokens_per_minute=600)

    for _ in range(10):
        quotas.release(quotas.acquire(acme), None)

    assert refusal(quotas, acme).quota == "tokens_per_minute: 600"
