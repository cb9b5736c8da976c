"""Runs all inputs of a call at once, and ends them together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from engine.errors import InvalidRequest
from engine.requests.checks import raise_if_any

T = TypeVar("T")


async def all_of(runs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all requests at once; raise the first error, the others then aborted.

    If inputs are invalid, the error names everything that is wrong with any of them.
    """
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        ended = (task.exception() for task in tasks if task in done)
        errors = [error for error in ended if error is not None]
        violations = [v for e in errors if isinstance(e, InvalidRequest) for v in e.violations]
        raise_if_any(list(dict.fromkeys(violations)))
        if errors:
            raise errors[0]
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
