"""Versions of a model come and go in a real server under load, and no call fails."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from tokenweir import AsyncClient, TokenweirClientError

from engine.package.files import FileEntry
from engine.package.package import read_manifest, write_manifest
from exporter.export import export_package
from loadtest.lab.serve import Served, served
from tests.end_to_end.test_end_to_end import CONFIGS, TRANSLATE, save_random
from tests.fakes.traces import traced  # noqa: F401 - a fixture

SETTINGS = "[log]\nrequests = false\n[admin]\nport = 0\n"
pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(400)]


def test_versions_are_swapped_under_load_and_one_that_fails_harms_nothing(tmp_path: Path) -> None:
    package = tmp_path / "dates"
    torch.manual_seed(0)
    save_random(tmp_path / "checkpoint", CONFIGS[TRANSLATE], noise=0.3)
    export_package(tmp_path / "checkpoint", package)

    (settings := tmp_path / "serve.toml").write_text(SETTINGS)
    with served(package, options=("--config", str(settings))) as server:
        failure = asyncio.run(_load_broken(server, package, tmp_path / "broken"))
        versions = asyncio.run(_swap(server, package))

    assert failure.reason == "LOAD_FAILED", failure
    assert "the workers do not start" in str(failure)
    assert versions == {"1", "2", "3"}


@contextmanager
def under_version(package: Path, version: str) -> Iterator[Path]:
    """Make a copy of a package under another version, for as long as the block runs."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "package"
        shutil.copytree(package, copy)
        write_manifest(read_manifest(package).model_copy(update={"version": version}), copy)
        yield copy


async def _swap(server: Served, package: Path) -> set[str]:
    """Put two versions in the place of the one before each, and return those that answered."""
    assert server.admin is not None
    versions = set[str]()

    async def ask() -> None:
        async with AsyncClient(server.address, max_attempts=1) as client:
            while True:
                answer = await client.generate("dates", "3rd of Feb, 1998")
                versions.add(answer.provenance.model_version)

    asking = [asyncio.create_task(ask()) for _ in range(4)]
    async with AsyncClient(server.admin) as admin:
        for old, new in ("1", "2"), ("2", "3"):
            with under_version(package, new) as copy:
                await admin.load_model(str(copy), model="dates", share=5)
                await admin.set_traffic("dates", new, 100)
                await admin.unload_model("dates", old)
    while "3" not in versions:
        await asyncio.sleep(0.01)
    for task in asking:
        assert not task.done(), task.exception()
        task.cancel()
    return versions


async def _load_broken(server: Served, package: Path, broken: Path) -> TokenweirClientError:
    """Return how the load of a package ends whose decoder is another graph."""
    assert server.admin is not None
    with under_version(package, "2") as copy:
        shutil.copytree(copy, broken)
    (broken / "decoder.onnx").write_bytes((broken / "encoder.onnx").read_bytes())
    manifest = read_manifest(broken)
    data = (broken / "decoder.onnx").read_bytes()
    entry = FileEntry(sha256=sha256(data).hexdigest(), size=len(data))
    files = {**manifest.files, "decoder.onnx": entry}
    write_manifest(manifest.model_copy(update={"files": files}), broken)
    async with AsyncClient(server.admin) as admin:
        with pytest.raises(TokenweirClientError) as caught:
            await admin.load_model(str(broken), share=100)
        (model,) = await admin.models()
        assert (model.model_version, model.state) == ("1", "ready")
        assert model.traffic is not None and model.traffic.share == 100
    return caught.value
