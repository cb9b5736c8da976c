"""Several versions of a model behind one gateway: which call goes to which, and how they change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
import pytest
from tokenweir.v1 import admin_service_pb2

from server.config import GatewayConfig
from server.gateway.gateway import Gateway
from server.gateway.traffic import ModelVersion
from tests.fakes.calls import Stubs, failure_of, generate, stream, until
from tests.fakes.engines import FakeGenerator, generation_package, running_worker
from tests.fakes.gateways import num_waiting, running_gateway

OLD, NEW = ModelVersion("dates", "7"), ModelVersion("dates", "8")
OTHER = ModelVersion("other", "7")


@dataclass
class Two:
    """A gateway before one worker of each of two versions; the old one has another model, too."""

    gateway: Gateway
    stubs: Stubs
    old: FakeGenerator
    new: FakeGenerator
    old_address: str
    new_address: str

    async def give_new(self, share: float) -> None:
        """Give the new version so much of the calls."""
        shares = {"dates": {NEW.version: share, OLD.version: 100 - share}, "other": {"7": 100}}
        await self.gateway.pool.apply_traffic({"shares": shares, "closed": []})

    async def ask(self, number: int, **fields: str) -> str:
        """Return the version that answers a request of this number."""
        request = generate("a", request_id=f"request {number}", **fields)
        response = await self.stubs.generation.Generate(request)
        return str(response.provenance.model_version)


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    old, new = (FakeGenerator(generation_package(version=version)) for version in "78")
    other = FakeGenerator(generation_package("other"))
    async with AsyncExitStack() as stack:
        addresses = [
            (await stack.enter_async_context(running_worker(*engines)))[1]
            for engines in ((old, other), (new,))
        ]
        gateway, stubs = await stack.enter_async_context(running_gateway(addresses[0]))
        await until(lambda: gateway.pool.num_serving == 1)
        await gateway.pool.sync(addresses)
        await until(lambda: gateway.pool.num_serving == 2)
        yield Two(gateway, stubs, old, new, *addresses)


async def test_a_version_that_comes_later_gets_calls_that_name_it_only(two: Two) -> None:
    assert {await two.ask(number) for number in range(9)} == {"7"}
    assert {await two.ask(number, model_version="8") for number in range(3)} == {"8"}
    assert {await two.ask(number, model="other") for number in range(3)} == {"7"}


async def test_calls_go_by_share_and_a_request_asked_again_goes_the_same_way(two: Two) -> None:
    await two.give_new(50)

    first, again = [[await two.ask(number) for number in range(40)] for _ in range(2)]

    assert first == again
    assert 8 < first.count("8") < 32
    assert len(two.old.requests) + len(two.new.requests) == 80


async def test_calls_without_an_id_are_divided_too(two: Two) -> None:
    await two.give_new(50)

    for number in range(40):
        await two.stubs.generation.Generate(generate(f"word{number}"))

    assert 8 < len(two.new.requests) < 32


async def test_a_stream_goes_by_share_too(two: Two) -> None:
    await two.give_new(100)

    messages = [m async for m in two.stubs.generation.GenerateStream(stream("a b"))]

    assert messages[-1].summary.provenance.model_version == "8"


async def test_the_other_version_answers_where_the_chosen_one_has_no_worker(two: Two) -> None:
    await two.give_new(100)
    await two.gateway.pool.sync([two.old_address])

    assert await two.ask(1) == "7"
    waiting = asyncio.ensure_future(two.ask(2, model_version="8"))
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done  # its workers may come back
    waiting.cancel()


async def test_the_list_has_the_versions_of_all_workers(two: Two) -> None:
    request = admin_service_pb2.ListModelsRequest(page_size=2)

    first = await two.stubs.admin.ListModels(request)
    request.page_token = first.next_page_token
    second = await two.stubs.admin.ListModels(request)

    found = [(m.model, m.model_version) for m in (*first.models, *second.models)]
    assert found == [OLD, NEW, OTHER]
    assert not second.next_page_token
    request.page_size = -1
    refused = await failure_of(two.stubs.admin.ListModels(request))
    assert "page_size" in refused.violations


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "dte"}, "no model 'dte' here; served: dates, other"),
        ({"model_version": "9"}, "no version '9' of model dates; served: 7, 8"),
    ],
)
async def test_what_no_worker_has_is_not_found_among_all(
    fields: dict[str, str], message: str, two: Two
) -> None:
    refused = await failure_of(two.stubs.generation.Generate(generate("a", **fields)))

    assert refused.code is grpc.StatusCode.NOT_FOUND
    assert message in refused.message


async def test_a_gateway_divides_calls_as_another_one_tells(two: Two) -> None:
    await two.gateway.pool.apply_traffic(
        {"shares": {"dates": {"8": 100, "7": 0}}, "closed": [["other", "7"]]}
    )

    assert {await two.ask(number) for number in range(9)} == {"8"}
    refused = await failure_of(two.stubs.generation.Generate(generate("a", model="other")))
    assert refused.reason == "MODEL_NOT_FOUND"


async def test_what_a_worker_is_handed_is_bounded_where_only_a_version_without_a_share_is_left(
    two: Two,
) -> None:
    await two.gateway.pool.sync([two.new_address])

    calls = [two.stubs.generation.GenerateStream(stream("HOLD")) for _ in range(40)]
    await until(lambda: num_waiting(two.gateway) + len(two.new.requests) == 40)

    assert num_waiting(two.gateway) == 40 - GatewayConfig().max_calls_per_worker
    two.new.release.set()
    for call in calls:
        assert [message async for message in call]
