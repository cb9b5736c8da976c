"""Which worker a gateway gives a call: by load, others' too, by model, and by how it begins."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenweir.v1 import common_pb2, prediction_service_pb2
from tokenweir.v1 import generation_service_pb2 as pb

from server.config import GatewayConfig
from server.gateway.affinity import _MAX_PREFIXES, Affinity, least_loaded, prefix_of
from server.gateway.backend import Backend
from tests.fakes.calls import generate, stream, until
from tests.fakes.engines import FakeGenerator, generation_package, running_worker
from tests.fakes.gateways import running_cell, running_gateway

GENERATE = "/tokenweir.v1.GenerationService/Generate"
STREAM = "/tokenweir.v1.GenerationService/GenerateStream"
SYSTEM = "You are a helpful assistant. " * 10


def prefix(text: str, **fields: Any) -> bytes | None:
    return prefix_of(GENERATE, generate(text, **fields).SerializeToString())


def worker(address: str, load: int = 0) -> Any:
    return SimpleNamespace(address=address, load=load)


def test_a_prefix_is_the_first_block_of_a_text_with_its_model_and_tenant() -> None:
    acme = pb.Scheduling(tenant="acme")

    assert prefix(SYSTEM + "a") == prefix(SYSTEM + "and something else")
    assert prefix(SYSTEM) is not None
    assert prefix(SYSTEM) != prefix(SYSTEM, model="other")
    assert prefix(SYSTEM) != prefix(SYSTEM, scheduling=acme)
    assert prefix(SYSTEM) != prefix("x" + SYSTEM)
    assert prefix("a short one") is None


def test_streams_and_scores_tokens_and_conversations_have_prefixes() -> None:
    whole = stream(SYSTEM + "a").SerializeToString()
    assert prefix_of(STREAM, whole) == prefix(SYSTEM)

    score = pb.ScoreRequest(model="dates", inputs=[pb.Input(text=SYSTEM)])
    assert prefix_of("/tokenweir.v1.GenerationService/Score", score.SerializeToString())

    def of(**prompt: Any) -> bytes | None:
        request = pb.GenerateRequest(model="dates", inputs=[pb.Input(**prompt)])
        return prefix_of(GENERATE, request.SerializeToString())

    ids = list(range(64))
    assert of(tokens=common_pb2.TokenIds(ids=[*ids, 7])) == of(
        tokens=common_pb2.TokenIds(ids=[*ids, 8])
    )
    assert of(tokens=common_pb2.TokenIds(ids=ids[:-1])) is None
    system = pb.ChatMessage(role="system", content=SYSTEM)
    chats = [pb.Chat(messages=[system, pb.ChatMessage(role="user", content=text)]) for text in "ab"]
    assert of(chat=chats[0]) == of(chat=chats[1]) is not None


@pytest.mark.parametrize("request_bytes", [b"", b"\xff\xff", b"\x22\x00"])
def test_what_has_no_prompt_has_no_prefix(request_bytes: bytes) -> None:
    assert prefix_of(GENERATE, request_bytes) is None
    label = prediction_service_pb2.LabelRequest(model="tags").SerializeToString()
    assert prefix_of("/tokenweir.v1.PredictionService/Label", label) is None


def test_a_prompt_goes_where_its_beginning_was_while_loads_are_near() -> None:
    affinity, one, two = Affinity(), worker("a"), worker("b", load=1)
    assert affinity.choose(b"p", [one, two]) is one

    one.load = 5
    assert affinity.choose(b"p", [one, two]) is one
    one.load = 6
    assert affinity.choose(b"p", [one, two]) is two
    one.load = 0
    assert affinity.choose(b"p", [one, two]) is two, "it was there last"
    assert affinity.choose(b"p", [one]) is one, "the other is gone"


def test_no_more_prefixes_are_remembered_than_there_is_room_for() -> None:
    affinity, one, two = Affinity(), worker("a"), worker("b", load=1)
    for number in range(_MAX_PREFIXES + 1):
        affinity.choose(number.to_bytes(4), [one])
    one.load = 2

    assert affinity.choose((1).to_bytes(4), [one, two]) is one
    assert affinity.choose((0).to_bytes(4), [one, two]) is two


class _CachingWorker:
    """A worker that has room for the beginnings of so many prompts, the latest ones."""

    def __init__(self, address: str) -> None:
        self.address, self.load = address, 0
        self._cache: OrderedDict[str, None] = OrderedDict()

    def serve(self, begins: str) -> bool:
        """Return whether the beginning was in the cache."""
        is_there = begins in self._cache
        self._cache[begins] = None
        self._cache.move_to_end(begins)
        if len(self._cache) > 8:
            self._cache.popitem(last=False)
        return is_there


@pytest.mark.parametrize(("has_affinity", "low", "high"), [(True, 0.9, 1.0), (False, 0.0, 0.6)])
def test_prefixes_are_found_again_much_more_often(
    has_affinity: bool, low: float, high: float
) -> None:
    random.seed(7)
    workers = [_CachingWorker(name) for name in "abcd"]
    backends = cast(Sequence[Backend], workers)
    affinity, running, hits = Affinity(), list[_CachingWorker](), 0
    for number in range(4000):
        begins = f"conversation {random.randrange(24)} "
        key = begins.encode() if has_affinity else None
        chosen = cast(_CachingWorker, affinity.choose(key, backends))
        hits += chosen.serve(begins) and number >= 200
        chosen.load += 1
        running.append(chosen)
        if len(running) > 12:  # the one that ends next is any of those that run
            running.pop(random.randrange(len(running))).load -= 1

    assert low <= hits / 3800 <= high
    assert max(w.load for w in workers) - min(w.load for w in workers) <= 6


async def test_a_gateway_sends_what_begins_alike_to_one_worker() -> None:
    engines = FakeGenerator(), FakeGenerator()
    config = GatewayConfig(worker_wait=60, prefix_affinity=True)
    async with running_cell(*engines, config=config) as cell:
        for number in range(20):
            await cell.stubs.generation.Generate(generate("begins-alike" * 30 + str(number)))

    assert sorted(len(engine.requests) for engine in engines) == [0, 20]


async def test_a_gateway_leaves_alone_whom_others_keep_busy() -> None:
    engines = FakeGenerator(), FakeGenerator()
    async with (
        running_worker(engines[0]) as (_, one),
        running_worker(engines[1]) as (_, two),
        running_gateway(one) as (_, others),
    ):
        held = [others.generation.Generate(generate("HOLD")) for _ in range(3)]
        await until(lambda: len(engines[0].requests) == 3)
        async with running_gateway(one, two) as (gateway, stubs):
            await until(lambda: gateway.pool.num_serving == 2)
            for _ in range(8):
                await stubs.generation.Generate(generate("a"))
        engines[0].release.set()
        await asyncio.gather(*held)

    assert [len(engine.requests) for engine in engines] == [3, 8]


async def test_a_call_goes_to_a_worker_that_has_its_model() -> None:
    dates, notes = FakeGenerator(), FakeGenerator(generation_package("notes"))
    async with running_cell(dates, notes) as cell:
        for _ in range(6):
            await cell.stubs.generation.Generate(generate("a", model="notes"))
            await cell.stubs.generation.Generate(generate("a", model="dates"))

    assert (len(dates.requests), len(notes.requests)) == (6, 6)


def test_of_workers_with_as_few_calls_each_is_chosen() -> None:
    workers = [worker(name) for name in "abc"]

    assert {least_loaded(workers).address for _ in range(100)} == set("abc")
