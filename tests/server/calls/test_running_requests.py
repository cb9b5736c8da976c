"""Requests are ended by their ids, and by nothing else."""

from __future__ import annotations

import asyncio

import pytest

from engine.errors import RequestAborted
from server.calls.running_requests import RunningRequests


async def wait(requests: RunningRequests, request_id: str, begun: asyncio.Event) -> None:
    with requests.abortable(request_id):
        begun.set()
        await asyncio.Event().wait()


async def waiting(requests: RunningRequests, request_id: str) -> asyncio.Task[None]:
    begun = asyncio.Event()
    task = asyncio.create_task(wait(requests, request_id, begun))
    await begun.wait()
    return task


async def test_all_requests_of_an_id_are_ended_and_no_others() -> None:
    requests = RunningRequests()
    tasks = [await waiting(requests, request_id) for request_id in ("a", "a", "b", "")]

    assert requests.abort(["a", "c", ""]) == {"a"}
    assert requests.abort(["a"]) == {"a"}  # asked twice before it has ended
    await asyncio.wait(tasks[:2], timeout=60)

    assert [type(task.exception()) for task in tasks[:2]] == [RequestAborted] * 2
    assert not any(task.done() for task in tasks[2:])
    assert requests.abort(["a"]) == set()
    for task in tasks:
        task.cancel()


async def test_a_client_that_goes_at_the_same_time_has_gone() -> None:
    requests = RunningRequests()
    task = await waiting(requests, "a")

    requests.abort(["a"])
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert requests.abort(["a"]) == set()


async def test_what_has_ended_is_known_no_more() -> None:
    requests = RunningRequests()

    with requests.abortable("a"):
        pass

    assert requests.abort(["a"]) == set()
