"""Errors in what watches an engine's steps."""

from __future__ import annotations

import pytest

from engine.lifecycle.step_watch import StepWatch


def fail_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next engine's watch fail as it begins, and work when it begins anew."""
    wait, failures = StepWatch.wait_until_over, [ZeroDivisionError("a bug")]

    async def wait_or_fail(watch: StepWatch) -> None:
        if failures:
            raise failures.pop()
        await wait(watch)

    monkeypatch.setattr(StepWatch, "wait_until_over", wait_or_fail)
