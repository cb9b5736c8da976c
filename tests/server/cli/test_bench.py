"""`tokenweir bench` on a tiny exported package: its table, its file, its refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.package.manifest import PackageFormat
from engine.package.package import read_manifest
from engine.requests.generation_defaults import GenerationDefaults
from exporter.models import TransformerConfig
from loadtest.benchmark.report import DecodeStep
from server.cli.app import run
from tests.fakes import fake_gpu
from tests.fakes.served import tiny_package
from tests.fakes.stand_in_certificate import export_with_stand_in, shown_on_device
from tests.fakes.traces import traced  # noqa: F401 - a fixture

CONFIG = TransformerConfig(
    architecture="decoder",
    d_model=8,
    num_heads=2,
    d_ff=16,
    vocab_size=31,
    num_decoder_layers=1,
    max_target_len=12,
    eos_token_id=2,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch from waiting for its own threads: a model this small has nothing to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    defaults = GenerationDefaults(beam=2, forced_end=2)
    return tiny_package(tmp_path_factory.mktemp("bench"), CONFIG, generation=defaults)


def bench(package: Path, *options: str) -> int:
    return run(["bench", str(package), "--prompt-tokens", "6", "--threads", "1", *options])


def test_every_concurrency_is_a_row_of_the_table_and_of_the_file(
    package: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "bench.json"
    monkeypatch.setattr(sys, "argv", ["/bin/tokenweir", "bench", "my package"])

    code = bench(
        package, "--concurrency", "1,3", "--new-tokens", "4", "--rounds", "2", "--json", str(file)
    )

    assert code == 0
    out = capsys.readouterr().out
    assert "not used: the package's defaults, beam 2, forced_end 2" in " ".join(out.split())
    title = "package, weights fp32: 6 prompt tokens, 4 new, greedy, 1 threads"
    assert title in " ".join(out.split())
    assert f"written: {file}" in out
    report = json.loads(file.read_text())
    assert re.fullmatch(r"[0-9a-f]{40}\+?|unknown.*", report["commit"])
    assert datetime.fromisoformat(report["written_at"]).tzinfo is UTC
    assert report["command"] == "tokenweir bench 'my package'"
    assert report["machine"].endswith("cores")
    cache = read_manifest(package).generation.cache
    numbers_per_token = 2 * cache.num_layers * cache.num_kv_heads * cache.head_dim
    assert [result["concurrency"] for result in report["results"]] == [1, 3]
    for result in report["results"]:
        assert len(result["rounds"]) == 2
        assert result["cache_bytes"] == result["concurrency"] * numbers_per_token * 4 * (6 + 4 - 1)
        parts = result["decode_step"]
        assert parts["total"] == pytest.approx(
            sum(parts[name] for name in ("model", "sampling", "scheduling", "rest"))
        )
        assert all(r["times"]["steps"] > r["prompt_times"]["steps"] for r in result["rounds"])


def test_threads_that_are_more_than_heads_are_given_but_not_used(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    options = ("--concurrency", "1", "--new-tokens", "2", "--rounds", "1", "--json", str(file))

    code = bench(package, *options, "--threads", "5")

    assert code == 0
    assert "2 of 5 threads: one a head" in " ".join(capsys.readouterr().out.split())
    report = json.loads(file.read_text())
    assert (report["num_threads"], report["num_decoder_threads"]) == (5, 2)


@pytest.mark.parametrize("columns", [60, 80])
def test_no_value_is_cut_however_narrow_the_terminal(
    columns: int, package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    concurrencies = "1,2,3,4,5,6"

    assert bench(package, "--concurrency", concurrencies, "--rounds", "1", "--new-tokens", "2") == 0

    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out
    cells = [line.strip("│ ").split("│") for line in out.splitlines() if line.startswith("│")]
    rates = [value for name, *values in cells if name.strip() == "tokens/s" for value in values]
    assert len([float(rate) for rate in rates]) == 6


def test_what_is_below_the_noise_of_a_measurement_has_no_share(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole step is a difference of two rounds, its parts were measured in it."""
    step = DecodeStep(100e-6, 150e-6, 5e-6, 2e-6, -57e-6)
    monkeypatch.setattr("loadtest.benchmark.report.decode_step", lambda _: step)

    assert bench(package, "--concurrency", "1", "--rounds", "1", "--new-tokens", "2") == 0

    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    cells = dict(re.split(r" *│ *", line) for line in lines if line.count("│") == 1)
    assert cells["decode step"] == "0.10 ms"
    assert (cells["model"], cells["rest"]) == ("unclear", "unclear")


def test_one_new_token_has_no_decode_step(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"

    code = bench(
        package,
        "--concurrency",
        "1",
        "--new-tokens",
        "1",
        "--strategy",
        "topk",
        "--json",
        str(file),
    )

    assert code == 0
    assert json.loads(file.read_text())["results"][0]["decode_step"] is None


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ["--new-tokens", "7"],
            3,
            "error: 6 prompt tokens and 7 new ones are 13, more than the 12",
        ),
        (["--new-tokens", "2", "--device", "cuda"], 3, "error: device (cuda) cannot run a package"),
        (["--new-tokens", "2", "--decode-buckets", "1,2"], 3, "or end them with it"),
        (["--concurrency", "1,x"], 2, "'1,x' is not a list of numbers from 1 to 4,096, such"),
        (["--concurrency", "0"], 2, "'0' is not a list of numbers from 1 to 4,096"),
        (["--beam", "2", "--strategy", "topk"], 2, "give --strategy, or --beam"),
    ],
)
def test_work_that_cannot_be_done_is_refused_with_the_way_out(
    options: list[str], code: int, message: str, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(package, *options) == code

    assert message in capsys.readouterr().err


def test_what_is_said_of_a_gpu_reaches_the_engine(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[EngineConfig] = []

    def note(*_: object, settings: EngineConfig, **__: object) -> None:
        given.append(settings)
        raise ConfigError("nothing is measured here")

    monkeypatch.setattr("loadtest.benchmark.run.run_benchmark", note)
    memory = ("--gpu-memory-utilization", "0.5", "--decode-buckets", "1,8")

    assert bench(package, "--device", "cuda", *memory) == 3

    (settings,) = given
    assert (settings.device, settings.gpu_memory_utilization) == ("cuda", 0.5)
    assert (settings.max_num_seqs, settings.decode_buckets) == (8, (1, 8))


def test_a_package_for_a_gpu_is_measured_there_and_refused_on_another(
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    device, file = fake_gpu.put_in(monkeypatch), tmp_path / "bench.json"
    shown = shown_on_device(gpu=device.gpu_name, driver=device.driver, buckets=(3,))
    checkpoint, path = package.parent / "checkpoint", tmp_path / "package"
    export_with_stand_in(checkpoint, path, PackageFormat.of("cuda", "fp32"), device=shown)
    work = ("--concurrency", "1,2", "--new-tokens", "4", "--rounds", "1", "--device", "cuda")

    assert bench(path, *work, "--json", str(file)) == 0

    results = json.loads(file.read_text())["results"]
    assert [result["concurrency"] for result in results] == [1, 2]
    assert capsys.readouterr().err.count("captured a decode call of 3 rows") == 2

    other = replace(device, gpu_name="another")
    monkeypatch.setattr("engine.cuda.device.open_device", lambda: other)
    assert bench(path, *work) == 3
    assert f"run `tokenweir verify {path} CHECKPOINT --device cuda" in capsys.readouterr().err


def test_bench_that_is_interrupted_ends_its_engine_first(package: Path) -> None:
    interrupted = """
import atexit, signal, sys, threading, time
from engine.generation.core import EngineCore

step, calls = EngineCore.step, []
def interrupting(self, *arguments, **options):
    calls.append(1)
    if len(calls) == 10:  # what the command itself registered comes behind this
        atexit.register(lambda: print(threading.active_count(), "thread", file=sys.stderr))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.5)  # a large model's step, that the interpreter's end would cut
    return step(self, *arguments, **options)

EngineCore.step = interrupting
from server.cli import main
main()
"""
    options = ("--prompt-tokens", "6", "--new-tokens", "4", "--rounds", "100000", "--threads", "1")
    done = subprocess.run(
        [sys.executable, "-c", interrupted, "bench", str(package), "--concurrency", "1", *options],
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert (done.returncode, done.stderr) == (130, "1 thread\n")
