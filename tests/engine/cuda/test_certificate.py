"""A package says what was shown of it on a device, and only what was shown is served there."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import Device, EngineConfig, RequestLimits
from engine.cuda import certificate as device_certificate
from engine.cuda.certificate import (
    is_invariant_as_shown,
    settings_as_shown,
)
from engine.errors import DeviceError, PackageError
from engine.lifecycle.engine import device_name, lifecycle_in_thread
from engine.lifecycle.lifecycle import WarmUpResult
from engine.package import package as packages
from engine.package.manifest import PackageFormat
from engine.package.package import Package, load_package, read_manifest, write_manifest
from loadtest.benchmark.engine_bench import settings_for
from server.worker import in_process
from tests.engine.package.test_package import ONE_PASS, TEXT, write_package
from tests.fakes.stand_in_certificate import LOSS, certificate, judged, shown_on_device

Change = Callable[[dict[str, Any]], None]

DEVICE = shown_on_device()
HERE = SimpleNamespace(gpu_name="NVIDIA H200", driver="13.0")
CHOSEN = EngineConfig(max_num_seqs=0)  # by the engine


def _for_cuda(manifest: dict[str, Any]) -> None:
    manifest["target"] = "cuda"
    manifest["certificate"].update(batch_invariant=False, device=DEVICE.model_dump(mode="json"))


def _on_device(directory: Path, **change: Any) -> Path:
    def edit(manifest: dict[str, Any]) -> None:
        _for_cuda(manifest)
        manifest["certificate"]["device"].update(change)

    return write_package(directory, edit)


def test_a_package_has_the_certificate_of_a_device(tmp_path: Path) -> None:
    found = load_package(_on_device(tmp_path / "p")).manifest.certificate.device

    assert found == DEVICE


def test_of_a_package_for_a_device_the_device_shows_invariance(tmp_path: Path) -> None:
    for shown in (True, False):
        path = _on_device(tmp_path / str(shown), batch_invariant=shown)

        assert read_manifest(path).certificate.shows_invariance == shown


def _of_cpu(manifest: dict[str, Any]) -> None:
    _for_cuda(manifest)
    manifest["target"] = "cpu"


def _of_one_pass(manifest: dict[str, Any]) -> None:
    _for_cuda(manifest)
    manifest.update(ONE_PASS, architecture="encoder", encoding=TEXT)
    manifest["files"]["model.onnx"] = manifest["files"]["encoder.onnx"]


def _with_loss(manifest: dict[str, Any]) -> None:
    _for_cuda(manifest)
    form = PackageFormat("cuda", weights="int4")
    device = shown_on_device(form, loss=LOSS.model_copy(update={"max_token_loss": 0.1}))
    found = certificate(form, device=device.model_copy(update={"tokens_equal": 80}))
    manifest.update(weights="int4", certificate=found.model_dump(mode="json"))


def _without_loss(manifest: dict[str, Any]) -> None:
    _with_loss(manifest)
    manifest["certificate"]["device"].update(loss=None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_of_cpu, "certificate.device: must not be there for the target cpu"),
        (_of_one_pass, "certificate.device.buckets: must not be there for encoder"),
        (_without_loss, "certificate.device: must have a loss, and nothing judged in int4"),
        (_with_loss, "certificate.device: only 80 of 96 tokens were equal"),
    ],
)
def test_a_device_certificate_that_does_not_go_with_its_package_is_refused(
    tmp_path: Path, change: Change, reason: str
) -> None:
    with pytest.raises(PackageError) as caught:
        load_package(write_package(tmp_path / "p", change))

    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"buckets": []}, "certificate.device.buckets: must be there for encoder-decoder"),
        ({"buckets": [8, 8], "batch_invariant": False}, "buckets: 8, 8 do not rise"),
        ({"buckets": [8, 32]}, "batch_invariant: cannot be with 2 buckets"),
        ({"tokens_equal": 95}, "certificate.device: only 95 of 96 tokens were equal"),
        ({"judged": []}, "certificate.device: must have what was judged, and no loss in fp32"),
        (
            {"judged": [judged(2.6, play="beams").model_dump()]},
            "certificate.device.judged: logits, beams: median 2.6e-06 is more than 2.5 times",
        ),
        ({"buckets": [0]}, "certificate.device.buckets.0"),
        ({"buckets": list(range(1, 66))}, "certificate.device.buckets"),
        ({"digest": "x"}, "certificate.device.digest"),
        ({"gpu": "\x1b[2J"}, "certificate.device.gpu"),
        ({"driver": ""}, "certificate.device.driver"),
        ({"onnxruntime": "1" * 129}, "certificate.device.onnxruntime"),
        ({"cases": 0}, "certificate.device.cases"),
        ({"extra": 1}, "certificate.device.extra"),
    ],
)
def test_a_device_certificate_that_cannot_be_is_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PackageError) as caught:
        load_package(_on_device(tmp_path / "p", **change))

    assert reason in str(caught.value)


def test_a_device_certificate_that_was_edited_is_refused(tmp_path: Path) -> None:
    path = _on_device(tmp_path / "p") / "manifest.json"
    path.write_text(path.read_text().replace('"digest": "0000', '"digest": "0001'))

    with pytest.raises(PackageError, match="was damaged or edited"):
        load_package(path.parent)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_certificate, "cuda_version", lambda: "1.31.1")


@pytest.mark.parametrize(
    ("buckets", "given", "expected"),
    [
        ([32], EngineConfig(), EngineConfig()),
        ([48], CHOSEN, EngineConfig(max_num_seqs=48)),
        ([8, 48], CHOSEN, EngineConfig(max_num_seqs=48, decode_buckets=(8, 48))),
    ],
)
def test_a_package_is_served_with_the_rows_that_it_was_shown_with(
    buckets: list[int],
    given: EngineConfig,
    expected: EngineConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    package = load_package(_on_device(tmp_path / "p", buckets=buckets, batch_invariant=False))

    assert settings_as_shown(package, HERE, given) == expected  # type: ignore[arg-type]
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "config", "reason", "options"),
    [
        ({"gpu": "NVIDIA L4"}, CHOSEN, "has GPU NVIDIA L4, this one is NVIDIA H200", ""),
        ({"onnxruntime": "2.0"}, CHOSEN, "has onnxruntime 2.0, installed is 1.31.1", ""),
        (
            {},
            EngineConfig(max_num_seqs=8),
            "decode calls of 32 rows, here they are of 8 rows",
            " --max-num-seqs 8",
        ),
        (
            {},
            EngineConfig(decode_buckets=(8, 32)),
            "here they are of 8, 32 rows",
            " --max-num-seqs 32 --decode-buckets 8,32",
        ),
        (  # two workers share the GPU: more rows would be verified than one has room for
            {"gpu": "NVIDIA L4"},
            replace(CHOSEN, gpu_memory_utilization=0.45),
            "has GPU NVIDIA L4",
            " --gpu-memory-utilization 0.45",
        ),
    ],
)
def test_a_package_that_was_shown_otherwise_is_refused_with_the_command(
    change: dict[str, Any], config: EngineConfig, reason: str, options: str, tmp_path: Path
) -> None:
    package = load_package(_on_device(tmp_path / "p", **change))

    with pytest.raises(PackageError) as caught:
        settings_as_shown(package, HERE, config)  # type: ignore[arg-type]

    assert reason in str(caught.value)
    run = f"run `tokenweir verify {package.path} CHECKPOINT --device cuda{options}`"
    assert str(caught.value).endswith(run)


def test_a_package_of_which_only_the_graphs_were_shown_is_refused_with_the_command(
    tmp_path: Path,
) -> None:
    package = load_package(write_package(tmp_path / "p", lambda m: m.update(target="cuda")))

    with pytest.raises(PackageError, match="on NVIDIA H200: .* CHECKPOINT --device cuda`$"):
        settings_as_shown(package, HERE, CHOSEN)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "rows", "buckets"),
    [
        ({}, 32, (8, 32)),
        ({}, 48, ()),
        ({"decode_buckets": (8, 32)}, 32, (8, 32)),
        ({"max_num_seqs": 32}, 32, ()),
    ],
)
def test_a_package_in_the_caller_s_process_has_the_rows_that_were_shown_unless_others_are_named(
    settings: dict[str, Any],
    rows: int,
    buckets: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = _on_device(tmp_path / "p", buckets=list(buckets or (rows,)), batch_invariant=False)
    seen: list[EngineConfig] = []

    def load(package: Package, config: EngineConfig) -> None:
        seen.append(settings_as_shown(package, HERE, config))  # type: ignore[arg-type]
        raise DeviceError("nothing runs here")

    monkeypatch.setattr(in_process, "load_engine", load)
    with pytest.raises(DeviceError):
        in_process.load(path, None, settings)

    assert [(found.max_num_seqs, found.decode_buckets) for found in seen] == [(rows, buckets)]


@pytest.mark.parametrize(
    ("shown", "limits", "offered"),
    [
        (True, RequestLimits(), True),
        (True, RequestLimits(max_num_outputs=4), True),
        (False, RequestLimits(), False),
        (True, RequestLimits(max_beam_width=64), False),
        (True, RequestLimits(max_beam_width=4, max_best_of=4, max_num_outputs=4), False),
    ],
)
def test_invariance_is_offered_in_calls_of_the_shape_that_the_certificate_is_of(
    shown: bool, limits: RequestLimits, offered: bool, tmp_path: Path
) -> None:
    package = load_package(_on_device(tmp_path / "p", batch_invariant=shown))

    assert is_invariant_as_shown(package, replace(CHOSEN, limits=limits)) == offered


def test_another_driver_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package = load_package(_on_device(tmp_path / "p", driver="13.1"))

    with caplog.at_level(logging.WARNING):
        settings_as_shown(package, HERE, CHOSEN)  # type: ignore[arg-type]

    assert "made with driver 13.1, this one is 13.0" in caplog.text


def test_a_manifest_that_cannot_be_written_whole_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_package(tmp_path / "p")
    before = (directory / "manifest.json").read_bytes()
    manifest = read_manifest(directory).model_copy(update={"name": "other"})

    def full(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(packages.Path, "write_bytes", full)
        with pytest.raises(PackageError, match="No space left"):
            write_manifest(manifest, directory)
    assert (directory / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["p"], "nothing is left beside it"

    write_manifest(manifest, directory)

    assert json.loads((directory / "manifest.json").read_bytes())["name"] == "other"
    assert load_package(directory).manifest.name == "other"


@pytest.mark.parametrize(
    ("device", "num_seqs", "rows", "buckets"),
    [("cuda", 3, 32, (8, 32)), ("cuda", 33, 33, ()), ("cpu", 3, 3, ())],
)
def test_a_benchmark_has_the_rows_that_were_shown_if_they_are_enough(
    device: Device, num_seqs: int, rows: int, buckets: tuple[int, ...], tmp_path: Path
) -> None:
    package = load_package(_on_device(tmp_path / "p", buckets=[8, 32], batch_invariant=False))

    found = settings_for(package, num_seqs, EngineConfig(device=device))

    assert (found.max_num_seqs, found.decode_buckets) == (rows, buckets)


def test_a_package_is_on_the_gpu_that_its_certificate_names(tmp_path: Path) -> None:
    package = load_package(_on_device(tmp_path / "p"))

    assert device_name(package, EngineConfig()) == "NVIDIA H200"
    assert device_name(package, EngineConfig(device="cpu")) == "cpu"


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
@pytest.mark.parametrize(("device", "extra"), [("cpu", 5), ("cuda", 0)])
async def test_the_thread_of_an_engine_gives_way_where_it_computes_and_not_where_a_gpu_waits_for_it(
    device: Device, extra: int, tmp_path: Path
) -> None:
    package = load_package(_on_device(tmp_path / "p"))
    seen: list[int] = []

    def warm_up() -> WarmUpResult:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return WarmUpResult()

    lifecycle = lifecycle_in_thread(package, replace(CHOSEN, device=device), "engine", warm_up)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    await lifecycle.start(lambda: None, lambda error_of: None)

    assert seen == [before + extra]
    await lifecycle.stop(0, asyncio.Event().wait, lambda: None)
