"""Authentication at the gateway: tokens, what comes of them, and quotas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status
from tokenweir.v1 import admin_service_pb2
from tokenweir.v1 import generation_service_pb2 as pb
from tokenweir.v1 import prediction_service_pb2 as prediction

from server.calls.event_thread import BackOff
from server.config import GatewayConfig
from server.settings import Auth
from server.telemetry.logs import REQUESTS, fields_of
from server.wire.bearer import BearerCall
from tests.fakes.calls import UP, Stubs, failure_of, generate, stream, until
from tests.fakes.engines import (
    OPTIONS,
    FakeGenerator,
    FakePredictor,
    prediction_package,
    running_worker,
)
from tests.fakes.gateways import entry, running_cell, running_gateway
from tests.fakes.wired_worker import scripted_worker

ACME: Any = (("authorization", "Bearer tw_acme"),)
STRANGER: Any = (("authorization", "Bearer tw_stranger"),)


@asynccontextmanager
async def served(
    folder: Path, engine: FakeGenerator, *others: FakePredictor, tenant: str = "acme", **fields: Any
) -> AsyncIterator[Stubs]:
    """Serve engines to a tenant, with what else its entry says."""
    tokens = folder / "tokens.toml"
    tokens.write_text(entry("tw_acme", tenant=tenant, **fields), encoding="utf-8")
    engine.capabilities = ("generate", "stream", *OPTIONS)
    config = GatewayConfig(worker_wait=60, auth=Auth(tokens=tokens), reflection=True)
    async with running_cell((engine, *others), config=config) as cell:
        yield cell.stubs


async def test_without_a_known_token_nothing_is_answered_but_health(tmp_path: Path) -> None:
    engine = FakeGenerator()
    async with served(tmp_path, engine) as stubs:
        calls = [
            stubs.generation.Generate(generate("a")),
            stubs.generation.GenerateStream(stream("a"), metadata=STRANGER),
            stubs.admin.ListModels(admin_service_pb2.ListModelsRequest()),
        ]
        refused = [await failure_of(call) for call in calls]
        reflect = stubs.channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        )
        reflected: Any = await reflect().code()
        assert await stubs.health_of("dates") == UP
        answer = await stubs.generation.Generate(generate("a"), metadata=ACME)
        models = await stubs.admin.ListModels(admin_service_pb2.ListModelsRequest(), metadata=ACME)

    unauthenticated = (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert [(one.code, one.reason) for one in refused] == [unauthenticated] * 3
    assert reflected is grpc.StatusCode.UNAUTHENTICATED
    assert answer.results[0].sequences[0].text == "a "
    assert [model.model for model in models.models] == ["dates"]
    assert len(engine.requests) == 1


async def test_tenant_and_priority_are_those_of_the_token(tmp_path: Path) -> None:
    engine = FakeGenerator()
    async with served(tmp_path, engine, max_priority=-1) as stubs:
        for scheduling in (
            None,
            pb.Scheduling(tenant="victim", priority=-100),
            pb.Scheduling(tenant="victim", priority=7),
        ):
            await stubs.generation.Generate(generate("a", scheduling=scheduling), metadata=ACME)
            call = stubs.generation.GenerateStream(
                stream("a", scheduling=scheduling), metadata=ACME
            )
            assert len([message async for message in call]) == 3

    found = [(request.tenant, request.priority) for request in engine.requests]
    assert found == [("acme", 0)] * 2 + [("acme", -1)] * 2 + [("acme", 7)] * 2


async def test_every_line_of_the_log_has_the_tenant_of_the_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server")
    forged = pb.Scheduling(tenant="victim")
    label = prediction.LabelRequest(model="tags", items=[prediction.Item(text="a")])
    claiming = (*ACME, ("tokenweir-tenant-bin", b"victim"))
    engines = FakeGenerator(), FakePredictor()
    async with served(tmp_path, *engines, tenant="Bäckerei", models=["dates", "tags"]) as stubs:
        ask = stubs.generation.Generate
        await failure_of(ask(generate("a", model="others", scheduling=forged), metadata=ACME))
        await stubs.prediction.Label(label, metadata=claiming)
        unknown = generate("a", model_version="8", scheduling=forged)
        await failure_of(ask(unknown, metadata=ACME))

    found = [fields_of(record) for record in caplog.records if record.name == REQUESTS]
    assert [(line["model"], line["tenant"], line["status"]) for line in found] == [
        ("others", "Bäckerei", "PERMISSION_DENIED"),
        ("tags", "Bäckerei", "OK"),
        ("dates", "Bäckerei", "NOT_FOUND"),
    ]


async def test_the_token_itself_does_not_reach_a_worker(tmp_path: Path) -> None:
    seen: list[str] = []

    async def note(request: bytes, call: BearerCall) -> bytes:
        seen.extend(key for key, _ in call.invocation_metadata())
        return b""

    (tokens := tmp_path / "tokens.toml").write_text(entry("tw_acme", tenant="acme"))
    config = GatewayConfig(worker_wait=60, auth=Auth(tokens=tokens))
    async with scripted_worker(note) as address:
        async with running_gateway(address, config=config) as (_, stubs):
            await stubs.generation.Generate(generate("a"), metadata=(*ACME, ("x-mine", "1")))

    assert "x-mine" in seen
    assert "authorization" not in seen


async def test_a_message_that_would_swallow_what_is_written_behind_it_is_refused(
    tmp_path: Path,
) -> None:
    stamp = pb.GenerateRequest(scheduling=pb.Scheduling(tenant="acme")).ByteSize() + 2
    forged = generate("a", scheduling=pb.Scheduling(tenant="victim")).SerializeToString()
    engine = FakeGenerator()
    async with served(tmp_path, engine) as stubs:
        method = stubs.channel.unary_unary("/tokenweir.v1.GenerationService/Generate")
        for num_bytes in range(stamp + 8):  # an unknown field that ends behind the message
            swallowing = forged + bytes([0xFA, 0x3F, num_bytes + 1])
            refused = await failure_of(method(swallowing, metadata=ACME))
            assert refused.reason == "MALFORMED_MESSAGE"

    assert not engine.requests


async def test_a_token_for_some_models_is_for_no_others(tmp_path: Path) -> None:
    async with served(tmp_path, FakeGenerator(), FakePredictor(), models=["dates"]) as stubs:
        await stubs.generation.Generate(generate("a"), metadata=ACME)
        items = [prediction.Item(text="a")]
        request = prediction.LabelRequest(model="tags", items=items, request_id="mine")
        refused = await failure_of(stubs.prediction.Label(request, metadata=ACME))

    assert (refused.code, refused.reason) == (
        grpc.StatusCode.PERMISSION_DENIED,
        "PERMISSION_DENIED",
    )
    assert "not for model 'tags'; it is for dates" in refused.message
    assert refused.metadata["request_id"] == "mine"


@pytest.mark.parametrize("is_uniform", [True, False])
async def test_a_token_for_some_models_is_shown_no_others(is_uniform: bool, tmp_path: Path) -> None:
    others = ("dates", "more"), ("digits", "tags")
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(entry("tw_acme", tenant="acme", models=["dates", "tags", "never"]))
    engines = [FakePredictor(prediction_package(name)) for names in others for name in names]
    groups = [engines] if is_uniform else [engines[:2], engines[2:]]
    config = GatewayConfig(auth=Auth(tokens=tokens))
    async with running_cell(*map(tuple, groups), config=config) as cell:
        pages, token = [], ""
        while not pages or token:
            request = admin_service_pb2.ListModelsRequest(page_size=1, page_token=token)
            page = await cell.stubs.admin.ListModels(request, metadata=ACME)
            pages.append([info.model for info in page.models])
            token = page.next_page_token

    assert pages == [["dates"], ["tags"]]


async def test_a_limited_token_that_lists_models_waits_for_a_worker(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(entry("tw_acme", tenant="acme", models=["dates"]))
    config = GatewayConfig(worker_wait=60, auth=Auth(tokens=tokens))
    async with (
        running_worker(FakeGenerator()) as (_, address),
        running_gateway(config=config) as (gateway, stubs),
    ):
        call = stubs.admin.ListModels(admin_service_pb2.ListModelsRequest(), metadata=ACME)
        await asyncio.sleep(0.1)
        assert not call.done()
        await gateway.pool.sync([address])
        models = await call

    assert [info.model for info in models.models] == ["dates"]


async def test_a_request_beyond_the_quota_is_refused_with_its_name_and_a_time(
    tmp_path: Path,
) -> None:
    engine = FakeGenerator()
    async with served(tmp_path, engine, max_requests=1) as stubs:
        call = stubs.generation.GenerateStream(stream("HOLD"), metadata=ACME)
        await engine.seen.wait()
        with pytest.raises(aio.AioRpcError) as caught:
            await stubs.generation.Generate(generate("a"), metadata=ACME)
        engine.release.set()
        assert len([message async for message in call]) == 3
        await stubs.generation.Generate(generate("a"), metadata=ACME)
        cancelled = stubs.generation.GenerateStream(stream("HOLD SLOW"), metadata=ACME)
        await until(lambda: len(engine.requests) == 3)
        cancelled.cancel()
        async with asyncio.timeout(60):  # for its place to come back
            while True:
                try:
                    await stubs.generation.Generate(generate("a"), metadata=ACME)
                    break
                except aio.AioRpcError:
                    await asyncio.sleep(0.01)

    status = rpc_status.from_call(caught.value)
    assert status is not None
    details = {detail.TypeName(): detail.value for detail in status.details}
    info = error_details_pb2.ErrorInfo.FromString(details["google.rpc.ErrorInfo"])
    failed = error_details_pb2.QuotaFailure.FromString(details["google.rpc.QuotaFailure"])
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert info.reason == "TENANT_QUOTA"
    assert [(v.subject, v.description) for v in failed.violations] == [
        ("tenant:acme", "max_requests: 1")
    ]
    assert "google.rpc.RetryInfo" in details


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_tokens_of_answers_are_counted(streamed: bool, tmp_path: Path) -> None:
    text = "a b c d e f g h"
    engine = FakeGenerator()
    engine.num_discarded = 4
    async with served(tmp_path, engine, tokens_per_minute=5) as stubs:
        started = time.monotonic()
        if streamed:  # eight tokens in, eight out, and four for nothing
            call = stubs.generation.GenerateStream(stream(text), metadata=ACME)
            _ = [message async for message in call]
        else:
            await stubs.generation.Generate(generate(text), metadata=ACME)
        refused = await failure_of(stubs.generation.Generate(generate("a"), metadata=ACME))
        took = time.monotonic() - started

    assert refused.reason == "TENANT_QUOTA"
    assert refused.retry_after is not None  # fifteen too many, five in a minute
    assert 180 - took <= refused.retry_after <= 180


@pytest.mark.parametrize("deadline", [None, 30.0])
async def test_an_answer_that_nobody_waits_for_is_counted_too(
    deadline: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.calls.deadlines._ENGINE_MARGIN_SHARE", 0.99)
    monkeypatch.setattr("server.calls.deadlines._MAX_ENGINE_MARGIN", 60.0)
    engine = FakeGenerator()
    async with served(tmp_path, engine, tokens_per_minute=1) as stubs:
        call = stubs.generation.Generate(generate("HOLD"), metadata=ACME, timeout=deadline)
        await engine.seen.wait()
        if deadline is None:
            call.cancel()
        await engine.done.wait()
        with pytest.raises((asyncio.CancelledError, aio.AioRpcError)):
            await call
        refused = await failure_of(stubs.generation.Generate(generate("a"), metadata=ACME))

    assert refused.reason == "TENANT_QUOTA"


async def test_a_request_that_is_wrong_costs_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, FakeGenerator(), tokens_per_minute=1) as stubs:
        for _ in range(3):
            refused = await failure_of(stubs.generation.Generate(generate(""), metadata=ACME))
            assert refused.reason == "INVALID_FIELD"


@pytest.mark.parametrize("quota", [1, 60])  # less than two messages, and than what is expected
async def test_a_stream_that_is_cut_short_is_counted(quota: int, tmp_path: Path) -> None:
    engine = FakeGenerator()
    async with served(tmp_path, engine, tokens_per_minute=quota) as stubs:
        call = stubs.generation.GenerateStream(stream("SLOW b HOLD"), metadata=ACME)
        for _ in range(2):
            await call.read()
        call.cancel()
        await engine.done.wait()
        refused = await failure_of(stubs.generation.Generate(generate("a"), metadata=ACME))

    assert refused.reason == "TENANT_QUOTA"


async def test_who_is_refused_for_reasons_of_his_own_slows_down_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[BackOff] = []
    monkeypatch.setattr(BackOff, "want", wanted.append)
    async with served(tmp_path, FakeGenerator(), max_requests=1, models=["dates"]) as stubs:
        holding = stubs.generation.GenerateStream(stream("HOLD"), metadata=ACME)
        await holding.initial_metadata()
        calls = [
            stubs.generation.Generate(generate("a")),
            stubs.generation.Generate(generate("a"), metadata=ACME),
            stubs.generation.Generate(generate("a", model="other"), metadata=ACME),
        ]
        reasons = [(await failure_of(call)).reason for call in calls]
        holding.cancel()

    assert reasons == ["UNAUTHENTICATED", "TENANT_QUOTA", "PERMISSION_DENIED"]
    assert not wanted
