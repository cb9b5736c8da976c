"""Groups of workers as applications of Ray Serve; Ray is scripted, test_swaps has the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import LoadFailed, PackageError
from server.gateway.admin.versions import Group
from server.packages.pinned import PinnedPackage
from server.packages.signature import sign
from server.ray import versions
from server.ray.deployment import actor_options
from server.ray.entries import WorkerEntry
from server.ray.versions import RayDeployment
from server.settings import Engine, Packages, Settings
from tests.engine.package.test_package import write_package
from tests.fakes.calls import until
from tests.fakes.engines import generation_package
from tests.fakes.signing import make_key
from tests.fakes.table import worker_at

CONFIG = Settings(
    packages=Packages({"dates": Path("one")}), engine=Engine(min_replicas=2, max_replicas=3)
)
DATES = generation_package("dates", version="2").manifest
GROUP = Group("1", {"iso": PinnedPackage("s3://two", "02", DATES)}, replicas=1)
NAME = "tokenweir+1"


class ScriptedRay:
    """Answers the calls of a deployment, and is its discovery."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.deployed: dict[str, tuple[Settings, Any]] = {}
        self.shortages: list[str | None] = []
        self.problem: str | None = None
        self.workers: list[WorkerEntry] = []
        script: dict[str, Callable[..., object]] = {
            "deploy": lambda config, service, packages, name: self.deployed.update(
                {name: (config, packages)}
            ),
            "deployment_problem": lambda name: self.problem,
            "shortage_now": lambda number, config: self.shortages and self.shortages.pop(0),
            "is_deployed": lambda name: name in self.deployed,
            "undeploy_soon": lambda names: [self.deployed.pop(name) for name in names],
        }
        for name, answer in script.items():
            monkeypatch.setattr(versions, name, answer)
        monkeypatch.setattr(versions, "_POLL", 0.001)

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def join(self, address: str, group: str) -> WorkerEntry:
        self.workers.append(replace(worker_at(address, pid=2**22 + 1), group=group))
        return self.workers[-1]


@pytest.fixture
async def ray(monkeypatch: pytest.MonkeyPatch) -> ScriptedRay:
    return ScriptedRay(monkeypatch)


def deployment_of(ray: ScriptedRay) -> RayDeployment:
    return RayDeployment(CONFIG, ray, ray, "s")  # type: ignore[arg-type]


async def test_a_group_is_an_application_of_its_own_and_has_started_with_its_workers(
    ray: ScriptedRay,
) -> None:
    deployment = deployment_of(ray)

    starting = asyncio.ensure_future(deployment.start(GROUP))
    await until(lambda: NAME in ray.deployed)
    ray.join("h:1", "tokenweir")
    done, _ = await asyncio.wait([starting], timeout=0.05)
    assert not done, "that is a worker of the start"
    ray.join("h:2", NAME)

    assert await starting == ["h:2"]
    config, packages = ray.deployed[NAME]
    assert config.packages.models == {"iso": "s3://two"}
    assert (config.engine.min_replicas, config.engine.max_replicas) == (1, 1)
    assert config.engine.num_threads == max(1, versions.num_threads(CONFIG))
    assert (packages["iso"].address, packages["iso"].manifest_sha256) == ("s3://two", "02")


async def test_a_group_has_ended_when_its_workers_have(ray: ScriptedRay) -> None:
    deployment = deployment_of(ray)
    worker = ray.join("h:2", NAME)
    await deployment.start(GROUP)

    ending = asyncio.ensure_future(deployment.end(GROUP))
    await until(lambda: NAME not in ray.deployed)
    done, _ = await asyncio.wait([ending], timeout=0.05)
    assert not done
    ray.workers.remove(worker)

    await ending


async def test_what_ray_says_of_workers_that_do_not_start_is_told(ray: ScriptedRay) -> None:
    ray.problem = "decoder.onnx has no such input"
    deployment = deployment_of(ray)

    with pytest.raises(LoadFailed, match="do not start: decoder.onnx has no such input"):
        await deployment.start(GROUP)
    await deployment.end(GROUP)

    assert not ray.deployed


async def test_without_room_nothing_is_started_and_a_moment_is_waited_for_it(
    ray: ScriptedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = deployment_of(ray)
    ray.join("h:2", NAME)

    ray.shortages = ["cores are missing", None]
    assert await deployment.start(GROUP) == ["h:2"]
    await deployment.end(Group("2", GROUP.packages))
    monkeypatch.setattr(versions, "_SHORTAGE_AFTER", 0.0)
    ray.shortages = ["cores are missing"] * 9
    with pytest.raises(LoadFailed, match="cores are missing"):
        await deployment.start(Group("2", GROUP.packages))

    assert ray.deployed.keys() == {NAME}


def test_versions_share_the_cores_of_a_ray_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert actor_options(CONFIG, "tokenweir")["num_cpus"] >= 1
    assert actor_options(CONFIG, NAME)["num_cpus"] == 0

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert actor_options(CONFIG, NAME)["num_cpus"] >= 1


async def test_a_version_is_read_only_if_the_required_key_has_signed_it(
    ray: ScriptedRay, tmp_path: Path
) -> None:
    key, public = make_key(tmp_path / "key.pem")
    config = replace(CONFIG, packages=replace(CONFIG.packages, require_signature=public))
    deployment = RayDeployment(config, ray, ray, "s")  # type: ignore[arg-type]
    package = write_package(tmp_path / "two")

    with pytest.raises(PackageError, match="has no signature"):
        deployment.read(str(package))
    sign(package, key)

    assert deployment.read(str(package)).manifest.version == "1"
