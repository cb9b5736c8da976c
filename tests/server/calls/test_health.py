"""The health of many names: what is known, who watches, and a watcher that does not read."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2

from server.calls import health as health_module
from server.calls.health import Health
from server.gateway import gateway as gateway_module
from tests.fakes.calls import DOWN, UP, until
from tests.fakes.gateways import running_gateway

UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Watcher:
    """A call of Watch: what it was sent, and whether its client reads."""

    def __init__(self, health: Health, name: str = "", *, reads: bool = True) -> None:
        self.seen: list[int] = []
        self._reads = asyncio.Event()
        if reads:
            self._reads.set()
        request = health_pb2.HealthCheckRequest(service=name)
        self.call = asyncio.create_task(health.Watch(request, self))

    async def write(self, response: health_pb2.HealthCheckResponse) -> None:
        self.seen.append(response.status)
        await self._reads.wait()

    def read(self) -> None:
        self._reads.set()

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise PermissionError(code, details)


async def test_a_watcher_is_sent_every_change_once_and_is_let_go_at_the_end() -> None:
    health = Health()
    watcher = Watcher(health, "dates")

    await until(lambda: watcher.seen == [UNKNOWN])
    for serving, seen in ((True, [UP]), (True, [UP]), (False, [UP, DOWN])):
        health.publish("dates", serving=serving)
        health.publish("tags", serving=serving)
        await until(lambda seen=seen: watcher.seen == [UNKNOWN, *seen])
    health.close()

    await asyncio.wait_for(watcher.call, 60)


async def test_a_watcher_that_does_not_read_holds_up_nobody_and_gets_the_latest() -> None:
    health = Health()
    stuck, other = Watcher(health, reads=False), Watcher(health)
    await until(lambda: stuck.seen == other.seen == [DOWN])

    health.publish("", serving=True)
    await until(lambda: other.seen == [DOWN, UP])
    health.go_down()
    await until(lambda: other.seen == [DOWN, UP, DOWN])
    assert stuck.seen == [DOWN]

    health.close()
    stuck.read()
    await asyncio.wait_for(asyncio.gather(stuck.call, other.call), 60)


async def test_what_went_down_for_good_stays_down() -> None:
    health = Health()
    health.publish("dates", serving=True)

    health.go_down()
    health.publish("dates", serving=True)

    listed = await health.List(health_pb2.HealthListRequest(), None)
    assert {name: one.status for name, one in listed.statuses.items()} == {"": DOWN, "dates": DOWN}


async def test_so_many_calls_watch_and_no_more_until_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_module, "_MOST_WATCHING", 2)
    health = Health()
    watchers = [Watcher(health) for _ in range(2)]
    await until(lambda: all(watcher.seen for watcher in watchers))

    with pytest.raises(PermissionError, match="RESOURCE_EXHAUSTED.*2 calls watch here"):
        await Watcher(health).call
    watchers[0].call.cancel()
    another = Watcher(health)
    await until(lambda: another.seen == [DOWN])

    health.close()
    await asyncio.wait_for(asyncio.gather(watchers[1].call, another.call), 60)


async def test_a_name_that_nothing_has_is_not_kept_however_long_it_is() -> None:
    with pytest.raises(PermissionError, match="INVALID_ARGUMENT.*has 1,025 characters"):
        await Watcher(Health(), "x" * 1025).call


async def test_a_call_that_never_says_what_it_asks_for_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_module, "READ_TIMEOUT", 0.2)
    async with running_gateway() as (_, stubs):
        call = stubs.channel.stream_unary("/grpc.health.v1.Health/Check")()
        code, details = await call.code(), await call.details()
        assert await stubs.health_of("") == DOWN

    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert details == "the request did not come within 0.2 s"
