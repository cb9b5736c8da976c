"""Losses are remembered by request, once for those that are lost together, and for a while."""

from __future__ import annotations

import pytest

from server.gateway.losses import Losses

WORKER = "127.0.0.1:1"


def lose(losses: Losses, *requests: bytes, num_calls: int = 1) -> None:
    """Have requests lose a worker together."""
    loss = losses.ahead(WORKER)
    for request in requests:
        losses.note(request, loss, WORKER, num_calls)


def count(losses: Losses, request: bytes) -> int:
    return sum(loss.counts for loss in losses.of(request))


def test_losses_of_a_request_are_kept_for_a_minute_after_the_last() -> None:
    now = 0.0
    losses = Losses(clock=lambda: now)
    lose(losses, b"poison")
    now = 50.0
    lose(losses, b"other", b"poison")

    now = 105.0
    assert [count(losses, one) for one in (b"poison", b"other", b"new")] == [2, 1, 0]

    now = 111.0
    assert [count(losses, one) for one in (b"poison", b"other")] == [0, 0]


def test_equal_requests_that_are_lost_together_have_lost_one_worker() -> None:
    losses = Losses(clock=lambda: 0.0)

    lose(losses, *[b"same"] * 8)

    assert count(losses, b"same") == 1


@pytest.mark.parametrize(("num_calls", "counted"), [(7, 1), (8, 0)])
def test_a_loss_counts_if_fewer_than_eight_calls_shared_it(num_calls: int, counted: int) -> None:
    losses = Losses(clock=lambda: 0.0)

    lose(losses, b"one", num_calls=num_calls)

    assert count(losses, b"one") == counted


@pytest.mark.parametrize("crashed", [True, False, None])
def test_a_loss_counts_unless_the_worker_was_killed_from_outside(crashed: bool | None) -> None:
    losses = Losses(lambda address: crashed if address == WORKER else None, lambda: 0.0)

    lose(losses, b"one")

    assert count(losses, b"one") == (crashed is not False)
