"""verify --device cuda writes what is found on the GPU into the manifest, or leaves it as it was.

No GPU is here: one that is made up stands for it, and the CPU computes in calls of fixed size.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from engine.config import EngineConfig
from engine.cuda import certificate as device_certificate
from engine.cuda import device as cuda_device
from engine.errors import CertificateError, ConfigError, DeviceError, PackageError
from engine.package.manifest import DeviceCertificate
from engine.package.package import Package, load_package
from exporter import verification, verify_device
from exporter.checkpoint import load_checkpoint, save_checkpoint
from exporter.prover import digest
from exporter.prover.digest import Found, find
from exporter.prover.execution import Execution, OnCpu, OnDevice
from exporter.verification import Verification, verify_package
from exporter.verify_device import verify_on_device
from server.cli.app import cli
from tests.exporter.conftest import MakeCheckpoint, try_few_cases
from tests.exporter.prover.test_device import SHORT_LLAMA, MakePackage, make_package  # noqa: F401
from tests.fakes.stand_in_certificate import edit_manifest

pytestmark = pytest.mark.usefixtures("few_cases")

ROWS = 6
CONFIG = EngineConfig(max_num_seqs=ROWS, device="cuda")

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def exported(make_package: MakePackage) -> tuple[Path, Path]:  # noqa: F811
    """A package of which only the graphs were shown, and its checkpoint."""
    package, checkpoint = make_package("gpt", "fp32", **SHORT_LLAMA)
    return package.path, checkpoint.path


@pytest.fixture
def package(exported: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported[0], tmp_path / "package"))


@pytest.fixture
def checkpoint(exported: tuple[Path, Path]) -> Path:
    return exported[1]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return put_in(monkeypatch)


def put_in(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put the CPU in place of a GPU, and this process in place of another one."""
    gpu = SimpleNamespace(gpu_name="made up", driver="13.0")
    for module in ("engine.cuda.device", "exporter.verify_device"):
        patch.setattr(f"{module}.open_device", lambda: gpu)
    patch.setattr(
        verify_device,
        "OnDevice",
        lambda package, config, device: OnCpu(config.decode_buckets or (config.max_num_seqs,)),
    )
    patch.setattr(verify_device, "find_elsewhere", find)
    patch.setattr(device_certificate, "cuda_version", lambda: "1.31.1")
    return gpu


@pytest.fixture(scope="module")
def verified(
    exported: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Verification[DeviceCertificate]]:
    """The same with what was found on the GPU, to be copied, and what is told of it."""
    path = Path(shutil.copytree(exported[0], tmp_path_factory.mktemp("verified") / "package"))
    with pytest.MonkeyPatch.context() as patch:
        try_few_cases(patch)
        put_in(patch)
        return path, verify_on_device(path, exported[1], CONFIG)


@pytest.fixture
def shown(verified: tuple[Path, Verification[DeviceCertificate]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(verified[0], tmp_path / "shown"))


def test_what_is_found_becomes_part_of_the_package(
    package: Path, checkpoint: Path, verified: tuple[Path, Verification[DeviceCertificate]]
) -> None:
    before = load_package(package).manifest

    shown, found = verified

    after = load_package(shown).manifest
    assert after.certificate.device == found.certificate
    assert (found.certificate.gpu, found.certificate.buckets) == ("made up", (ROWS,))
    assert after.model_copy(update={"certificate": before.certificate}) == before
    assert found.summary() == (
        f"package: package 1 matches {checkpoint} on made up: 7 files intact, "
        f"{found.certificate.cases} cases compared in decode calls of 6 rows, outputs reproduced "
        "by another process; device certificate written"
    )


def test_calls_have_the_rows_that_another_process_found_room_for(
    package: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = OnCpu((ROWS,))
    monkeypatch.setattr(verify_device, "find_elsewhere", lambda package, _: find(package, there))

    found = verify_on_device(package, checkpoint, replace(CONFIG, max_num_seqs=0))

    assert found.certificate.buckets == (ROWS,)


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(max_num_seqs=ROWS, gpu_memory_utilization=0.25),
        EngineConfig(max_num_seqs=ROWS, decode_buckets=(2, ROWS)),
    ],
)
def test_another_process_runs_a_package_as_this_one(
    config: EngineConfig, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device: Any = SimpleNamespace(index=3)
    here = OnDevice(load_package(package), config, device)
    seen: list[Execution] = []
    monkeypatch.setattr(cuda_device, "open_device", lambda index: SimpleNamespace(index=index))
    monkeypatch.setattr(digest, "find", lambda package, there: seen.append(there) or Found("", ()))

    digest.main(str(package), json.dumps(here.as_options()))

    assert seen == [here]


def test_what_is_there_already_is_found_again(shown: Path, checkpoint: Path) -> None:
    written = (shown / "manifest.json").read_bytes()

    again = verify_on_device(shown, checkpoint, CONFIG)

    assert again.summary().endswith("; device certificate reproduced")
    assert (shown / "manifest.json").read_bytes() == written


def test_a_device_certificate_that_was_edited_is_refused(shown: Path, checkpoint: Path) -> None:
    changes = {"batch_invariant": False, "digest": "0" * 64, "cases": 10**6}
    edit_manifest(shown, lambda m: m["certificate"]["device"].update(changes))
    edited = (shown / "manifest.json").read_bytes()

    with pytest.raises(CertificateError, match="device certificate is not what is found") as caught:
        verify_on_device(shown, checkpoint, CONFIG)

    assert "batch_invariant is False, found True" in str(caught.value)
    for name in ("digest", "cases"):
        assert f"{name} is {changes[name]}, found " in str(caught.value)
    assert (shown / "manifest.json").read_bytes() == edited


def test_a_certificate_of_another_gpu_is_replaced(
    shown: Path, checkpoint: Path, gpu: SimpleNamespace
) -> None:
    gpu.gpu_name = "another"

    verify_on_device(shown, checkpoint, CONFIG)

    device = load_package(shown).manifest.certificate.device
    assert device is not None and device.gpu == "another"


def test_a_package_of_other_weights_stays_as_it_was(
    package: Path, checkpoint: Path, tmp_path: Path
) -> None:
    other = load_checkpoint(checkpoint)
    other.model.get_parameter("decoder.layers.1.feed_forward.up_proj.bias").data[3] += 0.1
    shutil.copytree(checkpoint, tmp_path / "other")
    save_checkpoint(tmp_path / "other", "tiny", other.model, other.tokenizer)
    before = {path.name: path.read_bytes() for path in package.iterdir()}

    with pytest.raises(CertificateError, match="logits are .* from float64"):
        verify_on_device(package, tmp_path / "other", CONFIG)

    assert {path.name: path.read_bytes() for path in package.iterdir()} == before


def test_what_changes_while_it_is_compared_has_no_certificate(
    package: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (package / "manifest.json").read_bytes()

    def find_and_change(package: Package, execution: Execution) -> Found:
        tokenizer = package.path / "tokenizer.json"
        tokenizer.write_bytes(tokenizer.read_bytes() + b" ")
        return find(package, execution)

    monkeypatch.setattr(verify_device, "find_elsewhere", find_and_change)

    with pytest.raises(PackageError, match=r"tokenizer\.json was changed"):
        verify_on_device(package, checkpoint, CONFIG)

    assert (package / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("installed", ["onnxruntime", "onnxruntime-gpu"])
def test_a_package_is_looked_at_before_it_is_compared(
    installed: str, package: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "read_toolchain", lambda: {installed: "1.31.1"})
    edit_manifest(package, lambda m: m["toolchain"].update(onnxruntime="99.9"))
    with pytest.raises(CertificateError, match="its toolchain has onnxruntime 99.9"):
        verify_on_device(package, checkpoint, CONFIG)

    (package / "decoder.onnx").write_bytes(b"")
    with pytest.raises(PackageError, match="damaged"):
        verify_on_device(package, checkpoint, CONFIG)


def test_a_package_for_the_cpu_is_refused(
    make_checkpoint: MakeCheckpoint, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_manifest(package, lambda m: m.update(target="cpu"))
    loaded = load_package(package), None
    monkeypatch.setattr(verify_device, "load_both", lambda *_: loaded)

    with pytest.raises(ConfigError, match="export --target cuda"):
        verify_on_device(package, package, CONFIG)


def test_without_the_gpu_it_is_a_claim(
    shown: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load_package(shown).manifest.certificate.model_copy(update={"device": None})
    monkeypatch.setattr(verification, "prove", lambda *_, **__: found)

    line = verify_package(shown, checkpoint).summary()

    assert "; not shown here, but claimed: what it gives on made up with driver 13.0 and " in line


@pytest.mark.parametrize(
    ("rows", "invariance"),
    [(("--max-num-seqs", str(ROWS)), "yes"), (("--decode-buckets", f"2,{ROWS}"), "no")],
)
def test_the_command_writes_it_and_shows_it(
    rows: tuple[str, str], invariance: str, package: Path, checkpoint: Path
) -> None:
    arguments = ["verify", str(package), str(checkpoint), "--device", "cuda"]

    done = CliRunner().invoke(cli, [*arguments, *rows])

    assert done.exit_code == 0, done.output
    device = load_package(package).manifest.certificate.device
    shown = re.sub(r"[\s│]+", " ", done.output)  # cells as wide as the terminal lets them be
    assert device is not None and device.digest in shown.replace(" ", "")
    assert "made up, driver 13.0, onnxruntime 1.31.1" in shown
    assert f"rows bit-equal alone and in a batch {invariance}" in shown
    assert done.output.rstrip().endswith("device certificate written")


def test_the_share_of_the_memory_is_that_of_the_command(
    package: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[EngineConfig] = []

    def note(package: Path, checkpoint: Path, config: EngineConfig, *, progress: object) -> None:
        given.append(config)
        raise DeviceError("nothing is compared here")

    monkeypatch.setattr(verify_device, "verify_on_device", note)
    command = ["verify", str(package), str(checkpoint), "--device", "cuda"]

    CliRunner().invoke(cli, [*command, "--gpu-memory-utilization", "0.5"])

    assert given == [EngineConfig(max_num_seqs=0, device="cuda", gpu_memory_utilization=0.5)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-num-seqs", "8"], "goes with --device cuda"),
        (["--decode-buckets", "4,8"], "goes with --device cuda"),
        (["--device", "cpu"], "'cpu' is not 'cuda'"),
        (["--device", "cuda", "--text", __file__], "is compared on a GPU without it"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], message: str, package: Path, checkpoint: Path
) -> None:
    done = CliRunner().invoke(cli, ["verify", str(package), str(checkpoint), *options])

    assert done.exit_code == 2 and message in done.output
