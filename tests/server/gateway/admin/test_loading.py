"""Operators load and unload versions while calls go on; the workers are scripted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenweir.v1 import admin_service_pb2 as pb

from engine.errors import LoadFailed, PackageError
from server.config import GatewayConfig
from server.gateway.admin.versions import Group
from server.gateway.gateway import Gateway
from server.packages.pinned import PinnedPackage
from server.settings import Admin
from server.worker.worker import Worker
from tests.fakes.calls import Stubs, failure_of, generate, stubs_for, until
from tests.fakes.engines import (
    OPTIONS,
    FakeGenerator,
    FakePredictor,
    generation_package,
    prediction_package,
    running_worker,
)

GRACE = 60.0
PREDICTORS = {"tags": "label", "digits": "classify"}  # models, and what they do


class ScriptedDeployment:
    """Runs fake workers in this process; packages are called NAME-VERSION."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.gateway: Gateway
        self.workers: dict[str, list[tuple[Worker, str]]] = {}  # by group
        self.engines: dict[str, list[Any]] = {}  # by package: fakes
        self.failure: Exception | None = None  # the next start's
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.may_go_on = asyncio.Event()  # with the next worker
        self.may_go_on.set()
        self.starting = asyncio.Event()
        self._stack = stack

    def read(self, address: str) -> PinnedPackage:
        if "damaged" in address:
            raise PackageError(f"{address}: decoder.onnx has another hash; copy it again")
        name, _, version = address.partition("-")
        manifest = generation_package(name, version=version[:1]).manifest
        return PinnedPackage(Path(address), version.encode().hex(), manifest)

    async def start(self, group: Group) -> Sequence[str]:
        self.starting.set()
        await self.may_start.wait()
        error, self.failure = self.failure, None
        if error is not None:
            raise error
        for _ in range(group.replicas or 1):
            self.workers.setdefault(group.name, []).append(await self._start_worker(group))
            await self._sync()
            await self.may_go_on.wait()
        return [address for _, address in self.workers[group.name]]

    async def _start_worker(self, group: Group) -> tuple[Worker, str]:
        engines = []
        for model, package in group.packages.items():
            engine: FakeGenerator | FakePredictor
            if task := PREDICTORS.get(model):
                engine = FakePredictor(
                    prediction_package(model, version=package.manifest.version, task=task)
                )
            else:
                engine = FakeGenerator(generation_package(model, version=package.manifest.version))
                engine.capabilities += OPTIONS
            self.engines.setdefault(str(package.address), []).append(engine)
            engines.append(engine)
        return await self._stack.enter_async_context(running_worker(*engines))

    async def end(self, group: Group) -> None:
        workers = self.workers.pop(group.name, [])
        await self._sync()
        for worker, _ in workers:
            await worker.drain(GRACE)

    async def _sync(self) -> None:
        workers = [address for group in self.workers.values() for _, address in group]
        await self.gateway.pool.sync(workers)


@dataclass
class Served:
    """A gateway of models dates and other, version 1 both, in one worker, and its admin port."""

    deployment: ScriptedDeployment
    public: Stubs
    admin: Any  # the stub of the AdminService
    admin_address: str

    async def load(self, package: str, **fields: Any) -> pb.ModelInfo:
        return (await self.admin.LoadModel(load_of(package, **fields))).model_info

    async def versions(self) -> dict[tuple[str, str], float]:
        """Return the share of each version that is listed."""
        models = (await self.admin.ListModels(pb.ListModelsRequest())).models
        return {(m.model, m.model_version): m.traffic.share for m in models}

    async def answer(self, number: int = 0, **fields: str) -> str:
        request = generate("a", request_id=f"request {number}", **fields)
        response = await self.public.generation.Generate(request)
        return str(response.provenance.model_version)


def load_of(package: str, **fields: Any) -> pb.LoadModelRequest:
    return pb.LoadModelRequest(package=package, **fields)


def unload_of(version: str, model: str = "dates", **fields: Any) -> pb.UnloadModelRequest:
    return pb.UnloadModelRequest(model=model, model_version=version, **fields)


ONE = {("dates", "1"): 100.0, ("other", "1"): 100.0}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        deployment = ScriptedDeployment(stack)
        first = Group("", {name: deployment.read(f"{name}-1") for name in ("dates", "other")})
        admin = Admin(port=0)
        config = GatewayConfig(worker_wait=60, admin=admin)
        gateway = deployment.gateway = Gateway(config, deployment=(deployment, first))
        port = await gateway.start()
        stack.push_async_callback(gateway.close)
        await deployment.start(first)
        await until(lambda: gateway.pool.num_serving == 1)
        deployment.starting.clear()
        public = await stack.enter_async_context(stubs_for(f"127.0.0.1:{port}"))
        address = f"127.0.0.1:{gateway.admin_port}"
        admin = await stack.enter_async_context(stubs_for(address))
        yield Served(deployment, public, admin.admin, address)


async def test_a_version_is_loaded_beside_the_old_one_and_gets_its_share(served: Served) -> None:
    info = await served.load("dates-2", replicas=2, share=40)

    assert (info.model, info.model_version, info.state) == ("dates", "2", pb.MODEL_STATE_READY)
    assert (info.traffic.share, info.traffic.replicas) == (40, 2)
    assert await served.versions() == {**ONE, ("dates", "1"): 60.0, ("dates", "2"): 40.0}
    answers = [await served.answer(number) for number in range(40)]
    assert 6 < answers.count("2") < 30
    assert await served.answer(model_version="1") == "1"


async def test_without_a_share_it_is_there_for_those_who_name_it(served: Served) -> None:
    await served.load("dates-2")

    assert {await served.answer(number) for number in range(9)} == {"1"}
    assert await served.answer(model_version="2") == "2"


async def test_until_it_is_ready_a_version_gets_no_calls(served: Served) -> None:
    served.deployment.may_start.clear()
    loading = asyncio.ensure_future(served.load("dates-2", share=100))
    await served.deployment.starting.wait()

    models = (await served.admin.ListModels(pb.ListModelsRequest())).models
    refused = await failure_of(served.public.generation.Generate(generate("a", model_version="2")))
    assert [m.state for m in models if m.model_version == "2"] == [pb.MODEL_STATE_LOADING]
    assert refused.reason == "MODEL_VERSION_NOT_FOUND"
    assert await served.answer() == "1"

    served.deployment.may_start.set()
    await loading
    assert await served.answer() == "2"


async def test_a_version_gets_no_calls_while_some_of_its_workers_are_missing(
    served: Served,
) -> None:
    served.deployment.may_go_on.clear()
    loading = asyncio.ensure_future(served.load("dates-2", replicas=2, share=100))
    await until(lambda: served.deployment.gateway.pool.num_serving == 2)

    refused = await failure_of(served.public.generation.Generate(generate("a", model_version="2")))
    assert refused.reason == "MODEL_VERSION_NOT_FOUND"
    assert await served.answer() == "1"

    served.deployment.may_go_on.set()
    await loading
    assert await served.answer() == "2"


async def test_a_new_model_gets_all_of_its_calls(served: Served) -> None:
    info = await served.load("dates-2", model="iso")

    assert (info.model, info.traffic.share) == ("iso", 100)
    assert await served.answer(model="iso") == "2"


async def test_a_swap_under_load_fails_no_call(served: Served) -> None:
    going, answers = True, []

    async def ask(client: int) -> None:
        number = 0
        while going:
            number += 1
            answers.append(await served.answer(client * 10_000 + number))

    clients = [asyncio.ensure_future(ask(client)) for client in range(8)]
    for old, new in ("12", "23", "34"):
        await served.load(f"dates-{new}", share=5)
        for share in (50, 100):
            request = pb.SetTrafficRequest(model="dates", model_version=new, share=share)
            answer = await served.admin.SetTraffic(request)
            assert {m.model_version: m.traffic.share for m in answer.models} == {
                old: 100 - share,
                new: share,
            }
        await served.admin.UnloadModel(unload_of(old))
    going = False
    await asyncio.gather(*clients)

    assert set(answers) == {*"1234"}
    assert await served.versions() == {("dates", "4"): 100, ("other", "1"): 100}


async def test_an_unload_lets_calls_end_and_takes_no_new_ones(served: Served) -> None:
    await served.load("dates-2")
    running = served.public.generation.Generate(generate("HOLD", model_version="2"))
    (engine,) = served.deployment.engines["dates-2"]
    await engine.seen.wait()

    unloading = asyncio.ensure_future(served.admin.UnloadModel(unload_of("2")))
    await until(lambda: not served.deployment.workers.get("1"))
    refused = await failure_of(served.public.generation.Generate(generate("a", model_version="2")))
    models = (await served.admin.ListModels(pb.ListModelsRequest())).models
    assert not unloading.done()
    engine.release.set()

    assert (await running).results[0].sequences[0].text == "HOLD "
    await unloading
    assert refused.reason == "MODEL_VERSION_NOT_FOUND"
    assert [m.state for m in models if m.model_version == "2"] == [pb.MODEL_STATE_DRAINING]
    assert engine.stopped
    assert await served.versions() == ONE


async def test_what_shares_processes_with_an_unloaded_model_goes_on_in_new_ones(
    served: Served,
) -> None:
    await served.admin.UnloadModel(unload_of("1"))

    first, second = served.deployment.engines["other-1"]
    assert first.stopped and not second.stopped
    assert await served.answer(model="other") == "1"
    assert (await failure_of(served.public.generation.Generate(generate("a")))).reason == (
        "MODEL_NOT_FOUND"
    )


@pytest.mark.parametrize("failure", [LoadFailed("no memory left"), RuntimeError("a bug")])
async def test_a_load_that_fails_leaves_what_serves(failure: Exception, served: Served) -> None:
    served.deployment.failure = failure

    failed = await failure_of(served.admin.LoadModel(load_of("dates-2", share=50)))

    if isinstance(failure, LoadFailed):
        assert (failed.code, failed.reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "LOAD_FAILED",
        )
        assert failed.message == "no memory left"
    assert await served.versions() == ONE
    assert await served.answer() == "1"
    assert (await served.load("dates-2")).state == pb.MODEL_STATE_READY


async def test_no_password_of_an_address_is_logged(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await failure_of(served.admin.LoadModel(load_of("s3://key:secret@bucket/damaged")))

    begins = [one for one in caplog.messages if one == "the load of s3://bucket/damaged begins"]
    assert len(begins) == 1


async def test_an_unload_that_cannot_start_what_stays_changes_nothing(served: Served) -> None:
    served.deployment.failure = LoadFailed("no memory left")

    failed = await failure_of(served.admin.UnloadModel(unload_of("1")))

    assert failed.reason == "LOAD_FAILED"
    assert await served.versions() == ONE
    assert await served.answer() == "1"


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"package": ""}, "package", "is empty"),
        ({"package": "damaged"}, "package", "decoder.onnx has another hash"),
        ({"package": "dates-2", "model_version": "3"}, "model_version", "is version 2, not '3'"),
        ({"package": "dates-2", "model": "a b"}, "model", "letters, digits"),
        ({"package": "dates-2", "share": 101}, "share", "0 to 100"),
        ({"package": "dates-2", "replicas": -1}, "replicas", "-1 must be"),
    ],
)
async def test_what_cannot_be_loaded_is_named(
    fields: dict[str, Any], field: str, message: str, served: Served
) -> None:
    refused = await failure_of(served.admin.LoadModel(load_of(**fields)))

    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in refused.violations[field]
    assert await served.versions() == ONE


async def test_a_check_only_starts_nothing(served: Served) -> None:
    info = await served.load("dates-2", validate_only=True)

    assert (info.model_version, info.manifest_sha256) == ("2", b"2")
    assert await served.versions() == ONE


async def test_a_version_that_is_loaded_is_not_loaded_again(served: Served) -> None:
    await served.load("dates-2", share=30)
    again = await served.load("dates-2", share=10)
    refused = await failure_of(served.admin.LoadModel(load_of("dates-2 of another training")))

    assert again.traffic.share == 30
    assert len(served.deployment.engines["dates-2"]) == 1
    assert (refused.code, refused.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "OPERATION_REFUSED",
    )
    assert "dates 2 is served already" in refused.message


async def test_of_two_operators_one_wins_and_the_same_request_waits(served: Served) -> None:
    served.deployment.may_start.clear()
    first = asyncio.ensure_future(served.load("dates-2", request_id="first"))
    await served.deployment.starting.wait()

    for other in (
        served.admin.LoadModel(load_of("dates-3")),
        served.admin.LoadModel(load_of("dates-3", request_id="first")),
        served.admin.UnloadModel(unload_of("1", "other", request_id="first")),
        served.admin.UnloadModel(unload_of("1", "other")),
    ):
        refused = await failure_of(other)
        assert (refused.code, refused.reason) == (
            grpc.StatusCode.ABORTED,
            "OPERATION_IN_PROGRESS",
        )
        assert "the load of dates-2 runs" in refused.message
    first.cancel()  # its operator is gone: the load goes on
    again = asyncio.ensure_future(served.load("dates-2", request_id="first"))
    served.deployment.may_start.set()

    assert (await again).state == pb.MODEL_STATE_READY
    assert len(served.deployment.engines["dates-2"]) == 1


async def test_an_unload_that_is_done_is_done_for_who_asks_again(served: Served) -> None:
    await served.load("dates-2")
    running = served.public.generation.Generate(generate("HOLD", model_version="2"))
    (engine,) = served.deployment.engines["dates-2"]
    await engine.seen.wait()
    first = served.admin.UnloadModel(unload_of("2", request_id="once"))
    await until(lambda: not served.deployment.workers.get("1"))
    first.cancel()  # its operator is gone: the unload goes on
    engine.release.set()
    await running
    await until(lambda: served.deployment.gateway._versions._operation is None)

    for _ in range(2):
        await served.admin.UnloadModel(unload_of("2", request_id="once"))

    refused = await failure_of(served.admin.UnloadModel(unload_of("2")))

    assert refused.reason == "MODEL_VERSION_NOT_FOUND"


async def test_the_id_of_an_unload_that_is_done_unloads_something_else(served: Served) -> None:
    await served.load("dates-2")
    await served.load("dates-3")

    for version in "23":
        await served.admin.UnloadModel(unload_of(version, request_id="the same"))

    assert await served.versions() == ONE


async def test_what_is_unloaded_must_be_there_and_not_be_all(served: Served) -> None:
    await served.load("dates-2")

    unknown = await failure_of(served.admin.UnloadModel(unload_of("1", "dte")))
    unclear = await failure_of(served.admin.UnloadModel(unload_of("")))
    await served.admin.UnloadModel(unload_of("", "other"))
    await served.admin.UnloadModel(unload_of("1"))
    last = await failure_of(served.admin.UnloadModel(unload_of("2")))

    assert unknown.code is grpc.StatusCode.NOT_FOUND
    assert "of dates there are 1, 2" in unclear.violations["model_version"]
    assert (last.code, last.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "OPERATION_REFUSED",
    )
    assert "dates 2 is all that is served" in last.message
    assert await served.answer() == "2"


async def test_traffic_of_what_is_not_ready_is_refused(served: Served) -> None:
    request = pb.SetTrafficRequest(model="dates", model_version="2", share=5)

    unknown = await failure_of(served.admin.SetTraffic(request))
    served.deployment.may_start.clear()
    loading = asyncio.ensure_future(served.load("dates-2"))
    await served.deployment.starting.wait()
    early = await failure_of(served.admin.SetTraffic(request))
    served.deployment.may_start.set()
    await loading

    assert unknown.code is grpc.StatusCode.NOT_FOUND
    assert early.reason == "OPERATION_REFUSED"
