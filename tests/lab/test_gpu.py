"""The check of a GPU: its parts run by themselves, and everything that was asked for is told."""

from __future__ import annotations

import importlib
import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from engine.package.manifest import DeviceCertificate, PackageFormat
from engine.sampling.logits import StepLogits
from exporter.checkpoint import model_weights
from exporter.prover.generation_cases import Case
from loadtest.lab.gpu import answers, carry, command, machine, models, parts
from loadtest.lab.gpu.part import Part, Result, Settings
from loadtest.lab.gpu.running import run_parts
from tests.fakes import fake_gpu, fake_parts
from tests.fakes.processes import is_alive
from tests.parity.uncertified import write_uncertified

ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "work", "cpu", quick=True)


def part(name: str, package: str = "", seconds: float = 1.0, limit: float = 60.0) -> Part:
    return Part(name, package, seconds, limit)


def run(
    settings: Settings, out: Path, *chosen: Part, budget: float = 300, prepare: bool = False
) -> list[Result]:
    do = fake_parts.do
    found = run_parts(chosen, settings, out, budget, prepare=prepare, run=do, make=do)
    return [one for one in found if isinstance(one, Result)]


def test_a_part_that_crashes_or_hangs_does_not_end_the_rest(
    settings: Settings, tmp_path: Path
) -> None:
    names = ("crash", "hang", "break", "wrong", "right")
    chosen = [part(name, limit=1.0 if name == "hang" else 60.0) for name in names]

    crashed, hung, broken, wrong, right = run(settings, tmp_path, *chosen)

    assert crashed.status == "crashed" and "exit code -6" in crashed.summary
    assert hung.status == "timed out" and hung.summary.startswith("ended after 1 s; ")
    assert broken.status == "crashed" and "RuntimeError: no such kernel" in broken.summary
    assert wrong.status == "failed"
    assert (right.status, right.summary) == ("passed", "all right")
    log = (tmp_path / "log.txt").read_text()
    assert [log.index(f"== {name}\n") for name in names] == sorted(
        log.index(f"== {name}\n") for name in names
    )


def test_what_a_part_has_started_ends_with_it(settings: Settings, tmp_path: Path) -> None:
    """Else it would hold the memory of the device that the next part wants."""
    (result,) = run(settings, tmp_path, part("crash beside a worker"))

    assert result.status == "crashed"
    pid = re.search(r"^\d+$", (tmp_path / "log.txt").read_text(), re.M)
    assert pid is not None
    deadline = time.monotonic() + 20
    while is_alive(int(pid[0])):
        assert time.monotonic() < deadline


def test_what_would_pass_the_limit_is_not_begun_and_what_is_shorter_still_runs(
    settings: Settings, tmp_path: Path
) -> None:
    long, short = run(settings, tmp_path, part("hang", seconds=500), part("right"), budget=60)

    assert (long.status, long.estimated) == ("not run", 500)
    assert re.match(r"takes about 500 s, \d+ s were left", long.summary)
    assert short.status == "passed"


def test_a_part_without_its_package_says_why(settings: Settings, tmp_path: Path) -> None:
    lacking, other = run(settings, tmp_path, part("hang", "break"), part("right", "right"))

    assert lacking.status == "failed"
    assert lacking.summary == "no package: exit code 1: RuntimeError: no such kernel"
    assert other.status == "passed"


@pytest.mark.parametrize("prepare", [False, True])
def test_parts_keep_their_order_but_with_prepare_one_whose_package_is_made_goes_first(
    prepare: bool, settings: Settings, tmp_path: Path
) -> None:
    chosen = [part("wrong", "late"), part("right")]

    found = run(settings, tmp_path, *chosen, prepare=prepare)

    names = [result.name for result in found]
    assert names == (["right", "wrong"] if prepare else ["wrong", "right"])
    assert "late: passed in " in (tmp_path / "packages.txt").read_text()


def test_parts_are_chosen_by_exact_names_in_the_order_given() -> None:
    chosen = parts.choose(["bench.gpt2-124m.fp16", "machine"], slower=2)

    assert [one.name for one in chosen] == ["bench.gpt2-124m.fp16", "machine"]
    assert [one.package for one in chosen] == ["gpt2-124m.fp16", ""]
    assert chosen[1].seconds == 2 * parts.choose(["machine"])[0].seconds
    few, many = (parts.choose(["speed.gpt2-124m.fp16"], concurrencies=c)[0] for c in ([1], [1, 32]))
    assert few.seconds < many.seconds
    with pytest.raises(ValueError, match=r"no part is called bench, rows; known: machine, rows\.g"):
        parts.choose(["bench", "machine", "rows"])


def test_every_part_has_a_function_a_format_and_a_model_and_what_is_uncertain_comes_first() -> None:
    chosen = parts.choose([])

    for one in chosen:
        kind, *of = parts.pieces(one.name)
        module, function = parts.FUNCTIONS[kind]
        assert callable(getattr(importlib.import_module(f"loadtest.lab.gpu.{module}"), function))
        assert one.seconds < one.limit
        if of:
            assert isinstance(models.form_of(of[1]), PackageFormat)
            is_whole = kind in ("bench", "speed", "served")
            assert (of[0] in models.WHOLE) == is_whole, one.name
    kinds = [one.name.partition(".")[0] for one in chosen]
    first = [kinds.index(kind) for kind in ("machine", "rows", "certificate", "bench", "speed")]
    assert first == sorted(first)


@pytest.mark.long  # transformers is imported for it
def test_whole_shapes_have_the_parameters_of_the_real_ones() -> None:
    found = {}
    for name in models.WHOLE:
        config = models.converted(models.shape_of(name, quick=False))
        found[name] = sum(prod(weight.shape) for weight in model_weights(config))

    assert found == {
        "gpt2-124m": 124_439_808,
        "llama-1b": 1_235_814_400,
        "marian-base": 73_944_309,
    }


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(command.main, [*arguments, "--device", "cpu"])


def test_a_run_that_is_cut_off_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object, **__: object) -> Any:
        yield Result("machine", "passed", 20.0, 1.0, "right")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_parts", cut_off)

    invoke("--out", str(tmp_path / "out"))

    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [one["name"] for one in content["parts"]] == ["machine"]
    assert content["commit"] and content["settings"]["rounds"] == 3
    table = (tmp_path / "out" / "table.txt").read_text()
    assert table == "machine: passed in 1 s (20 estimated): right\n"


@pytest.mark.parametrize(("status", "code"), [("passed", 0), ("failed", 1), ("crashed", 1)])
def test_the_exit_code_says_whether_anything_was_wrong_and_what_is_left_is_named(
    status: Any, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [
        part("machine"),
        Result("machine", status, 1.0, 1.0, ""),
        *(Result(name, "not run", 9.0, 0.0, "") for name in ("one", "two")),
    ]
    monkeypatch.setattr(command, "run_parts", lambda *_, **__: results)

    done = invoke("--out", str(tmp_path / "out"))

    assert done.exit_code == code
    assert "machine (about 1 s) ...\n" in done.output
    assert done.output.endswith("for another call: --only one,two\n")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--budget", "0", "0.0 is not in the range x>0"),
        ("--concurrency", "1,x", "'1,x' is not a list of numbers from 1 to 4,096"),
        ("--concurrency", "0", "'0' is not a list of numbers"),
        ("--only", "rows", "no part is called rows; known: machine"),
    ],
)
def test_bad_options_are_refused(option: str, value: str, said: str, tmp_path: Path) -> None:
    done = invoke("--out", str(tmp_path), option, value)

    assert done.exit_code == 2 and said in done.output


def test_a_machine_without_the_onnxruntime_for_gpus_is_told_so_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("engine.distributions._installed", lambda name: None)

    done = CliRunner().invoke(command.main, ["--out", str(tmp_path)])

    assert done.exit_code == 2 and "onnxruntime-gpu is not installed" in done.output


def test_the_first_look_names_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_gpu.put_in(monkeypatch)
    monkeypatch.setattr(machine, "open_device", lambda: device)

    seen = machine.look(Settings(tmp_path))

    assert seen.found["gpu"] == device.gpu_name and device.gpu_name in seen.summary


@pytest.mark.long  # a model is exported for it
def test_rows_on_a_device_that_computes_pass_and_rows_that_depend_on_others_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = fake_gpu.put_in(monkeypatch)
    monkeypatch.setattr(answers, "open_device", lambda: device)
    config = models.converted(models.shape_of("gpt2", quick=True))
    path = write_uncertified(config, tmp_path, PackageFormat.of("cuda", "fp16")).path
    monkeypatch.setattr(answers, "make_package", lambda *_: path)
    for find in ("find", "find_elsewhere"):  # tests/exporter has what a digest is
        monkeypatch.setattr(answers, find, lambda *_: SimpleNamespace(digest="same"))
    settings = Settings(tmp_path)

    right = answers.rows(settings, "gpt2", "fp16")

    assert right.passed, right.summary
    assert right.found["tokens_equal"] == 64

    generate = answers.generate

    def depending(runner: Any, cases: Sequence[Case], *given: Any) -> list[StepLogits]:
        seen = generate(runner, cases, *given)
        if len(cases) > 1 and runner.is_on_device:
            seen[1] = seen[1]._replace(logits=np.asarray(seen[1].logits) + np.float32(1e-6))
        return seen

    monkeypatch.setattr(answers, "generate", depending)

    wrong = answers.rows(settings, "gpt2", "fp16")

    assert not wrong.passed and "NOT equal among others" in wrong.summary


@pytest.mark.parametrize(
    ("is_equal", "form", "code", "is_right"),
    [
        (True, "fp16", 0, True),
        (False, "fp16", 0, False),
        (False, "fp16.int4", 0, True),  # rounded weights are not promised to be
        (True, "fp16", 4, False),
    ],
)
def test_a_certificate_is_what_verify_says(
    is_equal: bool, form: str, code: int, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def tokenweir(*arguments: object) -> tuple[int, str]:
        asked.extend(arguments)
        return code, "the last line"

    shown = DeviceCertificate.model_construct(
        batch_invariant=is_equal, buckets=(32,), cases=9, tokens_equal=8, tokens_compared=8
    )
    manifest = SimpleNamespace(certificate=SimpleNamespace(device=shown), generation="some")
    monkeypatch.setattr(answers, "tokenweir", tokenweir)
    monkeypatch.setattr(answers, "make_package", lambda *_: Path("package"))
    monkeypatch.setattr(answers, "make_checkpoint", lambda *_: Path("checkpoint"))
    monkeypatch.setattr(answers, "read_manifest", lambda _: manifest)

    found = answers.certificate(Settings(Path("work")), "gpt2", form)

    assert found.passed == is_right
    assert asked[:3] == ["verify", Path("package"), Path("checkpoint")]
    assert asked[3:] == ["--device", "cuda", "--max-num-seqs", "32"]
    assert (found.summary == "the last line") == bool(code)


# -- what is carried -------------------------------------------------------------------------------


def test_device_code_of_other_gpus_and_of_experts_is_zeroed_in_its_place(tmp_path: Path) -> None:
    ours, experts = (b"\x7fELF" + b".text._Z3" + name + b"\0" for name in (b"gqa", b"MoeGemm"))
    first = entry(80, b"old code") + entry(90, ours) + entry(100, b"newer code")
    second = entry(90, experts)
    path = tmp_path / "provider.so"
    path.write_bytes(elf(b"".join(map(container, (first, second)))))
    before = path.read_bytes()

    report = carry.prune(path)

    after = path.read_bytes()
    assert len(after) == len(before)
    dropped = (b"old code", experts, b"newer code")
    assert all(part in before for part in (ours, *dropped))
    assert [part in after for part in (ours, *dropped)] == [True, False, False, False]
    assert report["kernels"] == ["_Z3MoeGemm"]


def entry(architecture: int, program: bytes) -> bytes:
    program += bytes(-len(program) % 4)
    head = struct.pack("<HHIQ", 2, 0, 32, len(program))
    return head + struct.pack("<I8xI", 0, architecture) + program


def container(entries: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def elf(code: bytes) -> bytes:
    names = b"\0.nv_fatbin\0.names\0"
    table = 64 + len(code) + len(names)
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HHH", head, 0x3A, 64, 2, 1)
    sections = [(1, 64, len(code)), (12, 64 + len(code), len(names))]
    headers = [struct.pack("<IIQQQQ24x", name, 0, 0, 0, at, size) for name, at, size in sections]
    return bytes(head) + code + names + b"".join(headers)


def test_what_was_packed_is_unpacked_whole_or_in_parts_and_the_check_is_started(
    tmp_path: Path,
) -> None:
    root = tmp_path / "project"
    (root / ".carry").mkdir(parents=True)
    place = root / "loadtest" / "lab" / "gpu"
    place.mkdir(parents=True)
    (place / "unpack.py").write_bytes((ROOT / "loadtest/lab/gpu/unpack.py").read_bytes())
    for package in (place.parent, place.parents[1]):
        (package / "__init__.py").touch()
    (place.parent / "__main__.py").write_text("import sys, carried; print(sys.argv[1:])")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "carried.py").write_text("")
    carry.pack(tmp_path / "tree", root / ".carry" / "site.tar.xz")

    assert started(place, tmp_path / "whole").stdout.endswith("['gpu', '--out', 'x']\n")

    carry.split(root / ".carry", room=100)
    (tmp_path / "carried").mkdir()
    for file in (root / ".carry").glob("part*/*"):
        file.rename(tmp_path / "carried" / file.name)

    assert started(place, tmp_path / "parts").stdout.endswith("['gpu', '--out', 'x']\n")

    (tmp_path / "carried" / "site.tar.xz.0").write_bytes(b"something else")

    assert "is not what was packed" in started(place, tmp_path / "none").stderr


def started(place: Path, site: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SITE": str(site), "CARRIED": str(site.parent / "carried")}
    command = [sys.executable, str(place / "unpack.py"), "--out", "x"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)
