"""Losses are remembered by request, once for those that are lost together, and for a while."""

from __future__ import annotations

from server.gateway.losses import Losses


def test_losses_of_a_request_are_kept_for_a_minute_after_the_last() -> None:
    now = 0.0
    losses = Losses(clock=lambda: now)
    losses.note(b"poison", 1)
    now = 50.0
    losses.note(b"other", 1)
    losses.note(b"poison", 2)

    now = 105.0
    assert (losses.of(b"poison"), losses.of(b"other"), losses.of(b"new")) == (2, 1, 0)

    now = 111.0
    assert (losses.of(b"poison"), losses.of(b"other")) == (0, 0)


def test_equal_requests_that_are_lost_together_have_lost_one_worker() -> None:
    losses = Losses(clock=lambda: 0.0)

    for _ in range(8):
        losses.note(b"same", 1)

    assert losses.of(b"same") == 1
