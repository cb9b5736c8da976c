"""serve --verify: what does not give what its checkpoint gives is not served."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from server.cli.app import run
from server.packages.signature import sign
from tests.engine.package.test_package import write_package
from tests.fakes.signing import make_key


@pytest.fixture(autouse=True)
def checkpoint(tmp_path: Path) -> None:
    """Let `tmp_path` look like a checkpoint."""
    (tmp_path / "config.json").write_text('{"model": {}}')


@pytest.fixture
def public_key(tmp_path: Path) -> Path:
    """The key that has signed the package in `tmp_path / "p"`."""
    key, public = make_key(tmp_path / "key.pem")
    sign(for_cuda(tmp_path / "p"), key)
    return public


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The actions in order: the arguments of `tokenweir verify`, and then "served"."""
    done: list[Any] = []

    def verify(command: list[str]) -> subprocess.CompletedProcess[bytes]:
        done.append(command[command.index("verify") + 1 :])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("server.cli.serving.service.check_cuda_distribution", lambda: None)
    monkeypatch.setattr("server.cli.serving.service.subprocess.run", verify)
    monkeypatch.setattr(
        "server.cli.serving.service.serve_until_ended", lambda _: done.append("served")
    )
    return done


def for_cuda(directory: Path) -> Path:
    return write_package(directory, lambda manifest: manifest.update(target="cuda"))


@pytest.mark.parametrize(
    ("options", "verified"),
    [
        ([], ["--device", "cuda"]),
        (["--device", "cpu"], []),
        (
            ["--num-gpus-per-replica", "0.5", "--max-num-seqs", "7"],
            ["--device", "cuda", "--gpu-memory-utilization", "0.45", "--max-num-seqs", "7"],
        ),
        (
            ["--decode-buckets", "1,8"],
            ["--device", "cuda", "--max-num-seqs", "8", "--decode-buckets", "1,8"],
        ),
    ],
)
def test_a_package_is_verified_as_it_is_served_and_then_served(
    options: list[str], verified: list[str], done: list[Any], tmp_path: Path
) -> None:
    package = for_cuda(tmp_path / "p")

    assert run(["serve", str(package), "--verify", str(tmp_path), *options]) == 0

    assert done == [[str(package), str(tmp_path), *verified], "served"]


@pytest.mark.parametrize(
    "options",
    [
        ("--gpu-memory-utilization", "0.9"),
        ("--decode-buckets", "1,8"),
        ("--max-num-seqs", "4"),
        ("--max-num-seqs", "4", "--gpu-memory-utilization", "0.5"),
    ],
)
def test_options_of_a_device_are_refused_where_none_is_asked_for(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = for_cuda(tmp_path / "p")

    assert run(["verify", str(package), str(tmp_path), *options]) == 2

    *_, line = capsys.readouterr().err.splitlines()
    names = " and ".join(options[::2])
    assert line.endswith(f"{names} {'go' if len(options) > 2 else 'goes'} with --device cuda")


def test_without_a_gpu_it_says_so_before_torch_is_loaded_or_anything_is_read(
    tmp_path: Path,
) -> None:
    package, nothing = for_cuda(tmp_path / "p"), tmp_path / "checkpoint"
    nothing.mkdir()
    (nothing / "config.json").write_text('{"model": {}}')
    (package / "tokenizer.json").unlink()
    program = (
        "import sys; from server.cli.app import run; code = run(sys.argv[1:]); "
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    command = [sys.executable, "-c", program, "verify", str(package), str(nothing)]

    done = subprocess.run(
        [*command, "--device", "cuda"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )

    assert done.returncode in (1, 3), done.stderr  # with onnxruntime for CUDA, and without
    assert re.match("error: (onnxruntime-gpu is not installed|.*CUDA)", done.stderr)


def test_what_would_be_verified_on_a_gpu_wants_onnxruntime_for_it_before_anything_is_done(
    tmp_path: Path, done: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ConfigError("onnxruntime-gpu is not installed")

    monkeypatch.setattr("server.cli.serving.service.check_cuda_distribution", refuse)
    given = [str(for_cuda(tmp_path / "p")), "--verify", str(tmp_path)]

    assert run(["serve", *given]) == 3
    assert done == []
    assert run(["serve", *given, "--device", "cpu"]) == 0


def test_one_package_is_verified_at_a_time(done: list[Any], tmp_path: Path) -> None:
    package = str(for_cuda(tmp_path / "p"))

    assert run(["serve", package, "--model", f"b={package}", "--verify", str(tmp_path)]) == 2

    assert done == []


@pytest.mark.parametrize("is_fetched", [True, False])
def test_what_would_be_served_as_it_was_before_is_not_written_to_on_a_gpu(
    is_fetched: bool,
    public_key: Path,
    done: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "p"
    named = f"file://{package}" if is_fetched else str(package)
    given = [named, "--verify", str(tmp_path), "--package-cache", str(tmp_path / "cache")]
    given += [] if is_fetched else ["--require-signature", str(public_key)]

    assert run(["serve", *given, "--max-num-seqs", "7"]) == 2

    *_, line = capsys.readouterr().err.splitlines()
    assert done == [] and named in line
    assert "run `tokenweir verify PACKAGE CHECKPOINT --device cuda --max-num-seqs 7` first" in line
    assert run(["serve", *given, "--device", "cpu"]) == 0
    assert done[-1] == "served"


def test_what_is_not_found_to_be_its_checkpoint_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("server.cli.serving.service.serve_until_ended")
    package = write_package(tmp_path / "p")

    code = run(["serve", str(package), "--verify", str(tmp_path)])

    error, refusal = capfd.readouterr().err.splitlines()
    assert code == 3, "as `verify` itself"
    assert error.startswith("error: ") and str(tmp_path) in error
    assert refusal == (f"error: {package} was not shown to match {tmp_path}, so it is not served")
