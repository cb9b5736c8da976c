"""Versions of a model come and go in a real server under load: no call fails, memory comes back."""

from __future__ import annotations

import asyncio
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from tokenweir import AsyncClient, TokenweirClientError

from engine.package.files import FileEntry
from engine.package.package import read_manifest, write_manifest
from exporter.export import export_package
from loadtest.lab.serve import Served, served
from loadtest.studies.swaps import SETTINGS, measure, under_version
from tests.test_end_to_end import CONFIGS, TRANSLATE, _save_random
from tests.traces import traced  # noqa: F401 - a fixture

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(400)]


def test_versions_are_swapped_under_load_and_one_that_fails_harms_nothing(tmp_path: Path) -> None:
    package = tmp_path / "dates"
    torch.manual_seed(0)
    _save_random(tmp_path / "checkpoint", CONFIGS[TRANSLATE], noise=0.3)
    export_package(tmp_path / "checkpoint", package)

    with served(package, SETTINGS) as server:
        failure = asyncio.run(_load_broken(server, package, tmp_path / "broken"))
        found = asyncio.run(measure(server, package, 2, streams=4, settle=1.0))

    assert failure.reason == "LOAD_FAILED", failure
    assert "the workers do not start" in str(failure)
    assert found["failed"] == 0, found["first_failures"]
    assert found["answers_by_version"].keys() == {"1", "swap-1", "swap-2"}  # type: ignore[attr-defined]


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
