"""The check of a GPU: its parts run by themselves, and everything that was asked for is told."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from io import StringIO
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
from rich.console import Console

from engine.errors import CertificateError
from engine.package.manifest import Loss
from engine.package.package import Package
from loadtest.gpu_check import certificates, gpu_use, speed, steps
from loadtest.gpu_check.__main__ import main
from loadtest.gpu_check.catalogue import choose_parts, make_parts
from loadtest.gpu_check.gpu_use import GpuUse
from loadtest.gpu_check.part import Outcome, Part, Result, Settings
from loadtest.gpu_check.probes import _graphs
from loadtest.gpu_check.requirements import REQUIREMENTS
from loadtest.gpu_check.results import Origin, print_tables, write
from loadtest.gpu_check.running import run_parts
from loadtest.gpu_check.timing import time_in_turns

ROOT = Path(__file__).parents[2]
FAKES = "tests.loadtest.fake_parts"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings("cpu", True, tmp_path / "work")


def part(name: str, **options: Any) -> Part:
    return Part(name, f"{FAKES}:{name}", **{"seconds": 1.0, "limit": 60.0, **options})


def run(settings: Settings, out: Path, *parts: Part, budget: float | None = None) -> list[Result]:
    return list(run_parts(parts, settings, out, budget))


def test_a_part_that_crashes_or_hangs_does_not_end_the_rest(
    settings: Settings, tmp_path: Path
) -> None:
    parts = [part("crash"), part("hang", limit=3.0), part("right")]

    crashed, hung, right = run(settings, tmp_path, *parts)

    assert crashed.status == "crashed" and "exit code -6" in crashed.summary
    assert hung.status == "timed out" and "ended after 3 s; begun" in hung.summary
    assert right.status == "passed" and right.found == {"device": "cpu"}
    log = (tmp_path / "log.txt").read_text()
    assert log.index("== crash") < log.index("== hang") < log.index("== right")


def test_what_a_part_has_started_ends_with_it(settings: Settings, tmp_path: Path) -> None:
    """Else it would hold the memory of the device that the next part wants."""
    (result,) = run(settings, tmp_path, part("crash_beside_a_worker"))

    assert result.status == "crashed"
    pid = re.search(r"^\d+$", (tmp_path / "log.txt").read_text(), re.M)
    assert pid is not None
    wait_until_ended(Path("/proc", pid[0], "stat"))


def wait_until_ended(stat: Path) -> None:
    for _ in range(1000):
        try:
            if stat.read_text().rpartition(") ")[2].startswith("Z"):
                return
        except OSError:  # it is gone
            return
        time.sleep(0.01)
    raise AssertionError("a worker goes on")


def test_a_wrong_answer_and_a_refusal_are_failures(settings: Settings, tmp_path: Path) -> None:
    wrong, refused = run(settings, tmp_path, part("wrong"), part("refuse"))

    assert (wrong.status, wrong.summary) == ("failed", "3 of 4 rows differ")
    assert (refused.status, refused.summary) == ("failed", "row 2 differs; export it again")
    assert wrong.is_bad and refused.is_bad


def test_an_exception_is_a_crash_with_its_message(settings: Settings, tmp_path: Path) -> None:
    (result,) = run(settings, tmp_path, part("break_down"))

    assert result.status == "crashed" and "RuntimeError: no such kernel" in result.summary


def test_what_does_not_fit_the_budget_is_named_and_what_is_shorter_still_runs(
    settings: Settings, tmp_path: Path
) -> None:
    long, short = run(settings, tmp_path, part("right", seconds=500.0), part("right"), budget=60)

    assert long.status == "not run" and not long.is_bad
    assert long.summary.startswith("takes about 500 s, ")
    assert short.status == "passed"


def test_what_needs_a_device_is_not_run_without_one(settings: Settings, tmp_path: Path) -> None:
    (result,) = run(settings, tmp_path, part("right", needs_device=True))

    assert (result.status, result.summary) == (
        "not run",
        "needs a CUDA device, and --device is cpu",
    )


def test_a_part_has_the_environment_that_it_asks_for(settings: Settings, tmp_path: Path) -> None:
    (result,) = run(settings, tmp_path, part("environment", environment={"ORT_ENABLE_XQA": "0"}))

    assert result.found == {"ORT_ENABLE_XQA": "0"}


def test_results_tell_counts_tables_and_that_a_device_is_emulated(tmp_path: Path) -> None:
    origin = Origin(
        "python -m loadtest.gpu_check", "abc", "2026-11-22", "a machine", {}, is_emulated=True
    )
    rows = [{"rows": 1, "captured": 310.25, "busy": None}]
    results = [
        Result("machine", "measured", 1.0, "EMULATED"),
        Result("steps.a", "measured", 2.0, "fast", {"tables": {"decode steps, us": rows}}),
        Result("certificate.a", "failed", 3.0, "row [2] differs"),
    ]

    write(origin, results, tmp_path)

    content = json.loads((tmp_path / "results.json").read_text())
    assert content["is_emulated"] and content["counts"]["measured"] == 2
    assert [one["name"] for one in content["parts"]] == ["machine", "steps.a", "certificate.a"]
    table = (tmp_path / "table.txt").read_text()
    assert "The device is emulated" in table and "row [2] differs" in table
    assert "steps.a: decode steps, us" in table and "310" in table


@pytest.mark.parametrize("width", [40, 80, 150])
def test_no_number_is_cut_however_narrow_the_terminal(width: int) -> None:
    origin = Origin("python -m loadtest.gpu_check", "abc", "2026-11-22", "a machine", {}, False)
    rows = [{f"kind {i}, ids read": 1000.0 * rows + i for i in range(12)} for rows in (1, 32)]
    results = [
        Result("speed.a", "measured", 1.0, "fast", {"tables": {"decode steps, us": rows}}),
        Result("variant.llama.int8-blocks-one-launch", "measured", 1.0, "a summary of it"),
    ]
    text = StringIO()

    print_tables(origin, results, Console(file=text, width=width))

    assert max(map(len, text.getvalue().splitlines())) <= width
    assert "…" not in text.getvalue()
    shown = re.findall(r"[\d,]*\d", text.getvalue())
    assert {f"{value:,.0f}" for row in rows for value in row.values()} <= set(shown)


def test_a_decoder_is_looked_at_with_its_nodes_fused_and_each_by_itself(
    settings: Settings,
) -> None:
    parts = {part.name: part.arguments for part in make_parts(settings)}
    body = parts["variant.gpt2.unfused"]["body"]

    own, unfused = (
        [node.op_type for node in ir.load(path / "decoder.onnx").graph]
        for path in (_graphs(settings, "gpt2", "fp16", "", body) for body in ("", body))
    )

    assert "SkipLayerNormalization" in own and "SkipLayerNormalization" not in unfused
    assert len(unfused) > len(own)
    efficient = parts["variant.gpt2.efficient-attention"]
    assert (efficient["precision"], efficient["options"]) == ("fp32", "sdpa_kernel=3")


def test_a_run_that_is_cut_off_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*arguments: Any) -> Any:
        yield Result("first", "passed", 1.0, "right")
        raise KeyboardInterrupt

    monkeypatch.setattr("loadtest.gpu_check.__main__.run_parts", cut_off)

    with pytest.raises(KeyboardInterrupt):
        main(["--out", str(tmp_path / "out"), "--device", "cpu"])

    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [one["name"] for one in content["parts"]] == ["first"]


@pytest.mark.parametrize(("status", "code"), [("passed", 0), ("failed", 1), ("crashed", 1)])
def test_the_exit_code_says_whether_anything_was_wrong(
    status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [Result("one", status, 1.0, ""), Result("two", "not run", 0.0, "")]  # type: ignore[arg-type]
    monkeypatch.setattr("loadtest.gpu_check.__main__.run_parts", lambda *arguments: results)

    assert main(["--out", str(tmp_path / "out"), "--device", "cpu"]) == code


def test_a_machine_without_the_onnxruntime_for_gpus_is_told_so_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.distributions._installed", lambda name: None)
    monkeypatch.setattr("loadtest.gpu_check.__main__._run", lambda *given: 0)

    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path)])

    assert ended.value.code == 2
    assert "onnxruntime-gpu is not installed" in capsys.readouterr().err
    assert main(["--out", str(tmp_path), "--only", "packages"]) == 0  # which needs none


def test_a_part_is_ended_after_minutes_on_a_gpu_and_when_it_is_said_on_a_slower_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}

    def note(parts: list[Part], *arguments: Any) -> list[Result]:
        limits.update({part.name: part.limit for part in parts})
        return []

    monkeypatch.setattr("loadtest.gpu_check.__main__.run_parts", note)
    command = ["--out", str(tmp_path), "--device", "cpu", "--quick"]

    main(command)
    assert limits.pop("packages") == 1800
    assert set(limits.values()) == {240}

    main([*command, "--limit", "3000"])
    assert set(limits.values()) == {3000}


@pytest.mark.parametrize("budget", ["-1", "0", "nan", "inf", "soon"])
def test_a_budget_is_a_time(
    budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path), "--device", "cpu", "--budget", budget])

    assert budget in capsys.readouterr().err


def test_a_file_in_the_place_of_a_directory_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path / "file" / "out"), "--device", "cpu"])

    assert str(tmp_path / "file") in capsys.readouterr().err


def test_every_part_names_a_function_that_takes_its_arguments() -> None:
    for one in make_parts(Settings("cuda", False, Path("work"))):
        module, _, name = one.run.partition(":")
        function = getattr(importlib.import_module(module), name)
        assert {*one.arguments} <= {*function.__annotations__} - {"settings", "return"}, one.name
        assert one.seconds < one.limit


def test_right_answers_come_before_speed_and_plain_formats_first() -> None:
    names = [one.name for one in make_parts(Settings("cuda", False, Path("work")))]

    assert len(names) == len(set(names))
    assert names[0] == "machine"
    assert names.index("certificate.marian.bf16") < names.index("certificate.dates.fp16.int4")
    assert names.index("certificate.marian.fp32.int4") < names.index("steps.gpt2-124m")
    assert "certificate.llama.fp16.kv-int8" in names
    assert "certificate.gpt2.fp16.kv-int8" not in names


def test_every_model_is_proven_in_every_format_and_every_shape_is_measured() -> None:
    names = {one.name for one in make_parts(Settings("cuda", False, Path("work")))}

    precisions = ("fp32", "fp16", "bf16")
    forms = {*precisions, *(f"{p}.{w}" for p in precisions for w in ("int8-blocks", "int4"))}
    models = ("dates", "text", "tagging", "digits", "sentiment", "gpt2", "llama", "marian")
    certificates = {f"certificate.{model}.{form}" for model in models for form in forms}
    certificates |= {f"certificate.llama.{precision}.kv-int8" for precision in ("fp16", "bf16")}
    assert {name for name in names if name.startswith("certificate.")} == certificates
    rows = {f"rows.{model}.{precision}" for model in ("gpt2", "llama") for precision in precisions}
    assert {name for name in names if name.startswith("rows.")} == rows
    shapes = ("gpt2-124m", "marian-base", "bart-large", "llama-1b", "llama-8b")
    assert {f"{kind}.{shape}" for kind in ("steps", "speed") for shape in shapes} <= names


def test_one_and_many_streams_are_measured_beside_hugging_face_on_the_same_device(
    tmp_path: Path,
) -> None:
    """The sizes for a GPU; smaller ones try the same with less."""
    work = speed._work(Settings("cuda", False, tmp_path), "llama-1b", "bf16")

    assert speed.CONCURRENCIES == steps._ROWS == (1, 32, 256)
    ours, in_one_bucket, *peers = work.engines
    assert [peer.name.partition(",")[0] for peer in peers] == [
        "Hugging Face generate",
        "torch eager",
    ]
    assert {peer.against for peer in peers} == {in_one_bucket.against} == {ours.name}
    settings = [setting for engine in work.engines for setting in engine.settings]
    assert all(setting["cuda"] == 1 and setting["quick"] == 0 for setting in settings)


def test_packages_are_made_beside_each_other_and_those_that_are_not_are_named(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def elsewhere(run: str, given: Settings, *, model: str, form: str) -> Outcome:
        if (model, form) == ("dates", "fp16"):
            return Outcome("row 2 differs", {}, passed=False)
        if (model, form) == ("llama", "fp16.kv-int8"):
            raise subprocess.CalledProcessError(-6, "python")
        return Outcome("24 cases", {}, passed=True)

    monkeypatch.setattr(certificates, "make_checkpoint", lambda *given, quick: None)
    monkeypatch.setattr(certificates, "elsewhere", elsewhere)
    cores = os.sched_getaffinity(0)

    outcome = certificates.export_all(settings)

    assert outcome.passed is False
    assert outcome.found["wrong"] == {
        "dates.fp16": "dates.fp16: row 2 differs",
        "llama.fp16.kv-int8": "llama.fp16.kv-int8: its process ended with -6",
    }
    assert len(outcome.found["seconds"]) > 30
    told = capsys.readouterr().out  # so that a log says how far it came
    assert "dates.fp16: row 2 differs in 0 s\n" in told and "text.bf16: 24 cases in 0 s\n" in told
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize(("lost", "is_taken"), [(0.3, True), (0.8, False), (math.nan, False)])
def test_a_format_that_rounds_may_not_lose_what_makes_an_answer(
    lost: float,
    is_taken: bool,
    settings: Settings,
    make_package: Callable[..., Package],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much of tokens and single logits random weights may lose: zeros are 0.8 away."""
    manifest = make_package().manifest
    loss = Loss.model_construct(mean_abs_logit_diff=2.0 * lost, logit_std=2.0)
    certificate = manifest.certificate.model_copy(update={"loss": loss})
    exported = manifest.model_copy(update={"certificate": certificate})
    monkeypatch.setattr(certificates, "make_checkpoint", lambda *given, quick: None)
    monkeypatch.setattr(certificates, "export_package", lambda *given, **options: exported)

    with nullcontext() if is_taken else pytest.raises(CertificateError, match="allowed are 0.4 of"):
        assert certificates.certify(settings, "digits", "fp16.int4").passed


def test_works_are_measured_in_turn_and_as_often_as_a_turn_has_time_for() -> None:
    runs: list[str] = []
    works = {"slow": lambda: runs.append("slow"), "fast": lambda: runs.append("fast")}

    seen = time_in_turns(works, lambda: None, seconds=0.0)

    turns = [name for name, _ in groupby(runs)]
    assert turns == ["slow", "fast"] * 4  # warming up, and three turns
    assert runs.count("slow") == runs.count("fast")
    assert all(timed.total > 0 and timed.host > 0 for timed in seen.values())


def test_nobody_knows_how_busy_a_gpu_is_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.cuda.nvml._LIBRARY", "libthat-is-nowhere.so")

    with GpuUse() as use:
        pass

    assert use.busy is None


def test_a_gpu_is_as_busy_as_nvml_says_once_what_was_before_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the first that CUDA sees, wherever NVML counts it: CUDA_VISIBLE_DEVICES hides some."""
    percents, is_over = [90, 80, 95, 0, 0], threading.Event()
    places: list[bytes] = []

    def tell_place(text: Any, size: int, index: int) -> int:
        text.value = b"0000:41:00.0"
        return index  # no error of the first, the only one that is seen

    def tell(handle: object, used: Any) -> int:
        if not percents:
            is_over.set()
            return 1  # it has nothing new
        used._obj.gpu = percents.pop()
        return 0

    nvml = SimpleNamespace(
        nvmlDeviceGetHandleByPciBusId_v2=lambda place, handle: places.append(place),
        nvmlDeviceGetUtilizationRates=tell,
    )
    monkeypatch.setattr(gpu_use, "open_nvml", lambda: nvml)
    monkeypatch.setattr(gpu_use, "_SECONDS", 0.001)
    monkeypatch.setattr(gpu_use, "load_cuda_libraries", lambda: None)
    monkeypatch.setattr(gpu_use, "load_functions", lambda: {"cudaDeviceGetPCIBusId": tell_place})
    gpu_use._place_of.cache_clear()

    with GpuUse() as use:
        assert is_over.wait(60)

    gpu_use._place_of.cache_clear()
    assert use.busy == 0.9
    assert places == [b"0000:41:00.0"]


def test_parts_are_chosen_by_what_their_names_hold() -> None:
    parts = make_parts(Settings("cuda", False, Path("work")))

    assert [one.name for one in choose_parts(parts, ["machine", "rows.llama.fp16"])] == [
        "machine",
        "rows.llama.fp16",
    ]
    with pytest.raises(ValueError, match="no part is called like 'gtp'; they begin with: machine"):
        choose_parts(parts, ["gtp"])


def test_what_has_to_be_installed_is_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {*project["dependencies"]}
    asked.update(*project["optional-dependencies"].values())

    assert set(REQUIREMENTS) <= asked


def test_nothing_else_has_to_be_installed() -> None:
    """Packages for the rest of the engine, a network or a server, may be missing there."""
    code = """
import importlib, json, pkgutil, sys
import loadtest.gpu_check as check
missing = ["click", "ray", "grpc", "matplotlib", "uvloop", "psutil"]
sys.modules.update(dict.fromkeys(missing))
for module in pkgutil.iter_modules(check.__path__):
    if module.name not in ("__main__", "hugging_face"):  # that, and torch inside, import more
        importlib.import_module(f"loadtest.gpu_check.{module.name}")
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto" / "python")])
    environment = {**os.environ, "PYTHONPATH": path}

    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr[-2000:]


def test_the_command_runs_a_part_and_writes_what_came_of_it(tmp_path: Path) -> None:
    out = tmp_path / "out"

    code = main(["--out", str(out), "--device", "cpu", "--quick", "--only", "machine"])

    content = json.loads((out / "results.json").read_text())
    (machine,) = content["parts"]
    assert code == 0 and machine["status"] == "measured"
    assert {"onnxruntime", "onnxruntime-gpu"} & {*machine["found"]["versions"]}
    assert content["settings"]["quick"] and not content["is_emulated"]
