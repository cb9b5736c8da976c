"""The command line: help, exit codes, messages; the calls go to a scripted worker."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.config import EngineConfig
from engine.errors import CertificateError
from exporter.checkpoint import save_checkpoint
from exporter.models import build_model
from exporter.training.state import STATE_NAME, RunState
from exporter.training.task import Task
from exporter.training.trainer import TrainingReport
from server.cli import app, demo
from server.cli.app import cli, run
from server.config import WorkerConfig
from server.settings import Settings
from tests.fakes.calls import DOWN, stubs_for
from tests.fakes.engines import (
    OPTIONS,
    FakeGenerator,
    FakePredictor,
    generation_package,
    prediction_package,
    running_worker,
)
from tests.fakes.stand_in_certificate import LOSS

HEAVY = ("torch", "ray", "onnxruntime", "grpc", "numpy", "matplotlib", "transformers")
SIZE_OF_BASE = (512, 6, 30_000)
MAX_MODULES = 120  # most are Python's own and click's


def test_help_imports_nothing_heavy_and_little_else() -> None:
    code = (
        "import sys; before = set(sys.modules); from server.cli.app import run; run(['--help'])\n"
        "new = set(sys.modules) - before\n"
        f"assert not set({HEAVY!r}) & new, sorted(new)\n"
        "print(len(new))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < MAX_MODULES


@pytest.mark.parametrize(
    ("typed", "found"), [("ser", {"serve"}), ("token --max", {"--max-priority", "--max-requests"})]
)
def test_a_shell_completes_commands_and_options(typed: str, found: set[str]) -> None:
    words = f"tokenweir {typed}"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "import sys; sys.argv = ['tokenweir']; from server.cli import main; main()"

    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | asked | {"_TOKENWEIR_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
    )

    assert {line.removeprefix("plain,") for line in done.stdout.split()} == found, done.stderr


def test_work_that_no_memory_holds_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**options: object) -> None:
        raise MemoryError("unable to allocate 97.7 GiB")

    monkeypatch.setattr(cli.commands["models"], "callback", fail)

    assert run(["models"]) == 1
    assert capsys.readouterr().err == (
        "error: not enough memory (unable to allocate 97.7 GiB); ask for less at once\n"
    )


MODEL = "model"


@pytest.mark.parametrize("given", ["1,100000", "0", "9" * 5000])
def test_a_benchmark_of_too_many_at_once_is_wrong_usage(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.json").touch()

    assert run(["bench", str(tmp_path), "--concurrency", given]) == 2

    err = capsys.readouterr().err
    assert "is not a list of numbers from 1 to 4,096" in err and len(err) < 500


def test_help_lists_every_command_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0

    out = capsys.readouterr().out
    for name in cli.commands:
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [name]]
        assert line.endswith("."), "the summary is cut"


@pytest.mark.parametrize("name", cli.commands)
def test_help_of_every_command_shows_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([name, "--help"]) == 0

    assert f"  tokenweir {name}" in capsys.readouterr().out.partition("Examples:")[2]


@pytest.mark.parametrize("name", cli.commands)
def test_help_of_every_command_is_no_wider_than_a_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    assert run([name, "--help"]) == 0

    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["train", "poems", "--out", "x"], "'poems' is not one of"),
        (["train", "text", "--out", "x"], "give --file FILE"),
        (["train", "dates", "--out", "x", "--file", __file__], "`dates`, which makes its own data"),
        (["train", "dates"], "Missing option '--out'"),
        (["train", "dates", "--out", "x", "--size", "tiny"], "--size is for translation, classif"),
        (["train", "translation", "--check"], "give --pairs FILE"),
        (["train", "images", "--file", __file__, "--dir", "."], "`images`, which takes --dir DIR"),
        (["train", "labelling", "--file", __file__, "--file", __file__], "from one file, got 2"),
        (
            ["train", "labelling", "--file", __file__, "--init", MODEL, "--size", "base"],
            "the one of --init has its size",
        ),
        (["serve"], "give at least one MODEL"),
        (["serve", "--model", "dates"], "--model 'dates' is not NAME=PATH"),
        (["serve", "--model", "a=x", "--model", "a=y"], "would be model 'a'"),
        (["serve", MODEL, "--replicas", "2", "--min-replicas", "1"], "give --replicas, or"),
        (["serve", MODEL, "--device", "tpu"], "'tpu' is not one of 'cpu', 'cuda'"),
        (["serve", MODEL, "--gpu-memory-utilization", "1.5"], "1.5 is not in the range 0<x<=1"),
        (
            ["serve", MODEL, "--decode-buckets", "8,x"],
            "'8,x' is not a list of numbers from 1 to 4,096",
        ),
        (["demo", "--precision", "bf16"], "--precision bf16 is for --device cuda"),
        (["generate", "text"], "Missing option '--model'"),
        (["loadtest", "--model", "m", "--rate", "1", "--concurrency", "1"], "give --rate for"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / MODEL).mkdir()
    content = "manifest.json" if arguments[0] == "serve" else "config.json"
    (tmp_path / MODEL / content).write_text('{"model": {}}')

    assert run(arguments) == 2

    assert message in capsys.readouterr().err


def test_an_error_is_one_line_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", str(tmp_path)]) == 3

    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "is empty; give the directory of a model" in err


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ((), EngineConfig(max_num_seqs=0)),
        (("--max-num-seqs", "7", "--device", "cpu"), EngineConfig(max_num_seqs=7, device="cpu")),
        (
            ("--decode-buckets", "1,8,40", "--gpu-memory-utilization", "0.5", "--device", "cuda"),
            EngineConfig(
                max_num_seqs=40,
                decode_buckets=(1, 8, 40),
                gpu_memory_utilization=0.5,
                device="cuda",
            ),
        ),
    ],
)
def test_serve_takes_the_settings_of_its_engines(
    options: tuple[str, ...],
    settings: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("server.cli.serving.service.serve_until_ended", served.append)
    (tmp_path / "manifest.json").write_text("{}")

    assert run(["serve", "--model", f"dates={tmp_path}", *options]) == 0

    assert [config.engine_config for config in served] == [settings]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (PermissionError(13, "Permission denied", "/x"), 3, "error: /x: Permission denied\n"),
        (OSError(28, "No space left on device"), 3, "error: No space left on device\n"),
        (ModuleNotFoundError("x", name="onnxruntime"), 3, "'tokenweir[cpu]', or for a GPU 'tok"),
        (ModuleNotFoundError("x", name="torch"), 3, "pip install 'tokenweir[export]'"),
        (click.ClickException("gone"), 1, "error: gone\n"),
    ],
)
def test_failures_have_their_exit_code_and_message(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setitem(app.cli.commands, "models", click.Command("models", callback=fail))

    assert run(["models"]) == code
    assert message in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(app.cli.commands, "models", click.Command("models", callback=fail))

    with pytest.raises(ZeroDivisionError):
        run(["models"])


def test_no_server_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    assert run(["models", "--server", f"127.0.0.1:{port}"]) == 4
    said = capsys.readouterr().err
    assert f"error: no server answers at 127.0.0.1:{port}" in said


async def _tokenweir(address: str, *arguments: str) -> int:
    return await asyncio.to_thread(run, [*arguments, "--server", address])


async def test_generate_prints_the_answer_to_every_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with running_worker(FakeGenerator()) as (_, address):
        assert await _tokenweir(address, "generate", "--model", "dates", "one two", "three") == 0

    assert capsys.readouterr().out == "one two \nthree \n"


async def test_generate_prints_pieces_as_they_come(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = FakeGenerator()
    async with running_worker(engine) as (_, address):
        command = asyncio.create_task(
            _tokenweir(address, "generate", "--model", "dates", "one HOLD two")
        )
        seen = ""
        while not seen:
            await asyncio.sleep(0.01)
            seen = capsys.readouterr().out
        assert not command.done()
        engine.release.set()
        assert await command == 0

    assert seen == "one "
    assert capsys.readouterr().out == "HOLD two \n"


async def test_generate_takes_lines_of_the_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_worker(FakeGenerator()) as (_, address):
        monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo three\n"))
        assert await _tokenweir(address, "generate", "--model", "dates") == 0
        monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo three\n"))
        assert await _tokenweir(address, "generate", "--model", "dates", "four", "-") == 0

    assert capsys.readouterr().out == "one \ntwo three \nfour \none \ntwo three \n"


async def test_every_line_has_its_line_also_one_that_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_worker(FakeGenerator()) as (_, address):
        for options in ((), ("--json",)):
            monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
            assert await _tokenweir(address, "generate", "--model", "dates", *options) == 1

    out, err = capsys.readouterr()
    lines = out.split("\n")
    assert lines[:3] == ["one ", "", "two "]
    answers = [json.loads(line) for line in lines[3:6]]
    assert answers[0]["sequences"][0]["text"] == "one "
    assert answers[1]["error"]["code"] == "INVALID_ARGUMENT"
    assert err.count("error: input 2: INVALID_ARGUMENT") == 2


async def test_several_outputs_are_printed_one_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--num-outputs", "3", "--temperature", "0.5", "--seed", "9")
    async with running_worker(FakeGenerator()) as (_, address):
        assert await _tokenweir(address, "generate", "--model", "dates", "one", *options) == 0

    assert capsys.readouterr().out == "one \n" * 3


@pytest.fixture
def generator() -> FakeGenerator:
    generator = FakeGenerator()
    generator.capabilities = (*generator.capabilities, *OPTIONS)
    return generator


async def test_beams_are_printed_with_their_scores(
    generator: FakeGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    beam = ("--beam", "4", "--length-penalty", "0")
    async with running_worker(generator) as (_, address):
        arguments = ("generate", "--model", "dates", "one two", *beam)
        assert await _tokenweir(address, *arguments, "--num-outputs", "2") == 0
        assert await _tokenweir(address, *arguments) == 0

    assert capsys.readouterr().out == "-0.2500\tone two \n-0.5000\tone two \none two \n"
    assert [request.params.length_penalty for request in generator.requests] == [0.0, 0.0]


async def test_tokens_are_printed_with_their_alternatives(
    generator: FakeGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_worker(generator) as (_, address):
        await _tokenweir(address, "generate", "--model", "dates", "one three", "--logprobs", "1")

    assert capsys.readouterr().out.splitlines() == [
        "one three ",
        "'<3>' -2.0000\t'<90>' -1.0000",
        "'<5>' -2.0000\t'<90>' -1.0000",
    ]


async def test_a_target_is_scored_with_its_tokens(
    generator: FakeGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_worker(generator) as (_, address):
        assert await _tokenweir(address, "score", "--model", "dates", "one", "two three") == 0

    assert capsys.readouterr().out == "-1.0000\n'<3>' -2.0000\n'<3>' -2.0000\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("one", "--seed", "-1"), "error: seed=-1 is outside 0 to 18446744073709551615"),
        (("one", "--beam", "2", "--top-k", "3"), "error: top_k, beam: give options of "),
        (("caf\udce9",), "error: byte 0xe9 behind 3 characters is not UTF-8; "),
    ],
)
async def test_what_cannot_be_sent_is_an_error_of_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _tokenweir("127.0.0.1:1", "generate", "--model", "dates", *arguments) == 2

    err = capsys.readouterr().err
    assert err.startswith(message) and err.count("\n") == 1


async def test_refusals_name_every_wrong_field(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--top-p", "3", "--max-new-tokens", "-1")
    async with running_worker(FakeGenerator()) as (_, address):
        assert await _tokenweir(address, "generate", "--model", "dates", "one", *options) == 1

    err = capsys.readouterr().err
    assert "top_p: 3 is outside (0, 1]" in err
    assert "max_new_tokens: -1 is below 0" in err


async def test_pairs_and_versions_reach_the_engine() -> None:
    engine = FakePredictor(prediction_package("mood", task="classify"))
    async with running_worker(engine) as (_, address):
        for command in ("classify", "embed"):
            arguments = (command, "--model", "mood", "ab", "--pair", "cd", "--model-version", "1")
            assert await _tokenweir(address, *arguments, "--truncate", "left") == 0
        assert await _tokenweir(address, *arguments[:4], "--model-version", "2") == 1

    assert [(item.text_pair, item.truncation) for item in engine.items] == [("cd", "left")] * 2


async def test_label_prints_stretches_and_labels(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakePredictor()
    async with running_worker(engine) as (_, address):
        assert await _tokenweir(address, "label", "--model", "tags", "ab cd", "--stride", "2") == 0

    assert [item.stride for item in engine.items] == [2]
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == ["ab", "cd"]


async def test_classify_prints_labels_with_probabilities(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = FakePredictor(prediction_package("mood", task="classify"))
    async with running_worker(engine) as (_, address):
        assert await _tokenweir(address, "classify", "--model", "mood", "ab", "--top", "0") == 0

    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    assert sum(float(probability) for _, probability in lines) == pytest.approx(1, abs=1e-3)


async def test_embed_prints_a_json_list(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_worker(FakePredictor()) as (_, address):
        assert await _tokenweir(address, "embed", "--model", "tags", "ab", "--normalize") == 0

    vector = json.loads(capsys.readouterr().out)
    assert sum(x * x for x in vector) == pytest.approx(1, rel=1e-5)


async def test_models_lists_names_and_capabilities(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_worker(FakeGenerator(), FakePredictor()) as (_, address):
        assert await _tokenweir(address, "models") == 0

    out = capsys.readouterr().out
    assert "dates" in out and "tags" in out and "generate" in out


async def test_models_says_on_which_gpu_and_in_which_precision_a_model_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = generation_package()
    half = package.manifest.model_copy(update={"precision": "fp16"})
    engine = FakeGenerator(package.model_copy(update={"manifest": half}))
    engine.device = "NVIDIA H200"
    async with running_worker(engine) as (_, address):
        assert await _tokenweir(address, "models") == 0

    assert "NVIDIA H200, in fp16" in capsys.readouterr().out


async def test_models_shows_the_defaults_of_a_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # in one line
    package = generation_package(beam=4, length_penalty=1.0, banned_tokens=tuple(range(10)))
    async with running_worker(FakeGenerator(package)) as (_, address):
        assert await _tokenweir(address, "models") == 0

    out = capsys.readouterr().out
    assert "banned_tokens [0 1 2 3 4 5 6 7, 10 in all], beam 4, length_penalty 1" in out


async def test_models_shows_how_near_a_model_is_to_pytorch_by_what_it_gives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    async with running_worker(FakeGenerator(), FakePredictor()) as (_, address):
        assert await _tokenweir(address, "models") == 0

    out = capsys.readouterr().out
    assert (
        "12 cases, proof standard, same next token 96 of 96, logits within 1e-05 of float64, "
        "PyTorch itself 1e-05" in out
    )
    assert "labels that differ 1 of 40, largest difference of a probability 2.5e-06" in out


async def test_models_shows_how_near_answers_to_a_text_are_and_the_comparison_of_an_import(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    package = generation_package()
    loss = LOSS.model_copy(update={"text_lines": 12, "chrf_between": 97.0})
    told = {"loss": loss, "original": "compared with GPT of transformers 5: 24 inputs"}
    found = package.manifest.certificate.model_copy(update=told)
    manifest = package.manifest.model_copy(update={"certificate": found})
    engine = FakeGenerator(package.model_copy(update={"manifest": manifest}))
    async with running_worker(engine) as (_, address):
        assert await _tokenweir(address, "models") == 0

    out = capsys.readouterr().out
    assert "to the eager model's 97.0, on 12 lines" in out
    assert "compared with GPT of transformers 5: 24 inputs" in out


async def test_health_says_serving_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_worker(FakeGenerator()) as (_, address):
        assert await _tokenweir(address, "health") == 0
        assert await _tokenweir(address, "health", "dates") == 0

    assert capsys.readouterr().out == "SERVING\nSERVING\n"


async def test_health_of_a_broken_model_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeGenerator()
    config = WorkerConfig(health_period=0.01)
    async with running_worker(engine, config=config) as (_, address), stubs_for(address) as stubs:
        engine.healthy = False
        await stubs.wait_for_health("dates", DOWN)
        assert await _tokenweir(address, "health", "dates") == 1

    assert capsys.readouterr().out == "NOT_SERVING\n"


async def test_json_has_everything_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    generator, mood = FakeGenerator(), FakePredictor(prediction_package("mood", task="classify"))
    generator.capabilities = (*generator.capabilities, *OPTIONS)
    commands = (
        ("models",),
        ("health", "dates"),
        ("generate", "--model", "dates", "one", "two", "--num-outputs", "2", "--temperature", "1"),
        ("score", "--model", "dates", "one", "two"),
        ("classify", "--model", "mood", "ab"),
        ("label", "--model", "tags", "ab cd"),
    )
    async with running_worker(generator, mood, FakePredictor()) as (_, address):
        for command in commands:
            assert await _tokenweir(address, *command, "--json") == 0

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    dates, tags, other, health, one, two, score, classes, labels = lines
    assert {dates["model"], tags["model"], other["model"]} == {"dates", "tags", "mood"}
    assert health == {"service": "dates", "status": "SERVING"}
    assert [len(answer["sequences"]) for answer in (one, two)] == [2, 2]
    assert one["provenance"]["model"] == "dates" and one["usage"]["output_tokens"] > 0
    assert score["positions"][0]["chosen"]["piece"] == "PDM-"  # <3>
    assert classes["labels"][0].keys() == {"label", "probability", "index"}
    assert [span["text"] for span in labels["spans"]] == ["ab", "cd"]


@pytest.mark.parametrize("columns", [60, 80])
async def test_models_shows_all_it_has_to_say_however_narrow_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    engine = FakeGenerator()
    async with running_worker(engine) as (_, address):
        assert await _tokenweir(address, "models") == 0

    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out
    joined = "".join(line.rstrip("│ ").rpartition("│")[2].strip() for line in out.splitlines())
    facts = ["ready", "encoder-decoder", "01" * 32, *engine.capabilities]
    facts += [f"{name} {value}" for name, value in engine.package.manifest.toolchain.items()]
    assert all(fact.replace(" ", "") in joined.replace(" ", "") for fact in facts)


async def test_health_of_an_unknown_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_worker(FakeGenerator()) as (_, address):
        assert await _tokenweir(address, "health", "nonsense") == 1

    assert "has no service or model 'nonsense'" in capsys.readouterr().err


@pytest.mark.usefixtures("never_late")
async def test_loadtest_prints_a_table_and_writes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--json", str(tmp_path / "run.json"), "--png", str(tmp_path / "run.png"))
    options = ("--requests", "20", "--concurrency", "4", *files)
    async with running_worker(FakeGenerator()) as (_, address):
        assert await _tokenweir(address, "loadtest", "--model", "dates", *options) == 0

    assert "20 of 20" in capsys.readouterr().out
    assert (tmp_path / "run.json").stat().st_size > 0
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("never_late")
async def test_loadtest_makes_the_folders_of_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "run.json"
    engine = FakeGenerator()
    options = ("loadtest", "--model", "dates", "--requests", "2", "--json", str(file))
    async with running_worker(engine) as (_, address):
        assert await _tokenweir(address, *options) == 0
        asked = len(engine.requests)
        assert await _tokenweir(address, *options[:-1], str(tmp_path)) == 3
        assert await _tokenweir(address, *options[:-1], str(file / "run.json")) == 3

    report = json.loads(file.read_text())
    assert report["machine"] and report["commit"] and report["command"].startswith("tokenweir")
    assert len(engine.requests) == asked, "told before a request was sent"
    err = capsys.readouterr().err
    assert f"cannot write {tmp_path}: it is a directory" in err


async def test_loadtest_of_an_unknown_model_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with running_worker(FakeGenerator()) as (_, address):
        assert await _tokenweir(address, "loadtest", "--model", "nope") == 3

    assert "has no model 'nope'; it has: dates" in capsys.readouterr().err


def _begun_run(task: str, directory: Path, *, finished: bool = False) -> None:
    state = RunState(task=task, seed=3, fingerprint="x", steps=9, step=4, finished=finished)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {"rng": torch.zeros(1)},
        directory / STATE_NAME,
        metadata={"training_state": state.model_dump_json()},
    )


def test_data_are_checked_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"text number {i}\t{'even' if i % 2 == 0 else 'odd'}\n" for i in range(400))
    (tmp_path / "rows.tsv").write_text(rows)

    given = ["--file", str(tmp_path / "rows.tsv")]
    assert run(["train", "classification", *given, "--check"]) == 0

    out = capsys.readouterr().out
    assert "examples to learn from" in out and "2 labels: even, odd" in out
    assert [path.name for path in tmp_path.iterdir()] == ["rows.tsv"]


def test_options_of_a_run_on_own_data_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, judged, start, out = (tmp_path / name for name in ("pairs", "judged", "start", "out"))
    pairs.write_text("".join(f"one {i}\teins {i}\n" for i in range(100)))
    judged.write_text("".join(f"two {i}\tzwei {i}\n" for i in range(100)))
    made, given = list[Task](), list[Any]()

    def train(
        build: Callable[[int], Task], out: Path, *, progress: Any, say: Any, **options: Any
    ) -> TrainingReport:
        made.append(build(7))
        given.append((out, options))
        return TrainingReport("mine", out, 9, 9, 7, 1.0, 1, {}, "it learned", True, ())

    monkeypatch.setattr("exporter.training.trainer.train", train)
    asked = ["train", "translation", "--pairs", str(pairs), "--out", str(out)]

    assert run([*asked, "--valid", str(judged), "--size", "base", "--seed", "7"]) == 0
    assert run([*asked, "--valid", str(judged), "--steps", "9"]) == 0
    save_checkpoint(start, "mine", build_model(made[1].config), made[1].tokenizer)
    assert run([*asked, "--valid", str(judged), "--init", str(start), "--resume"]) == 0

    assert given == [
        (out, {"resume": False, "seed": 7, "steps": None}),
        (out, {"resume": False, "seed": None, "steps": 9}),
        (out, {"resume": True, "seed": None, "steps": None}),
    ]
    base, tiny, started = made
    assert (base.config.d_model, base.config.num_decoder_layers, base.recipe.steps) == SIZE_OF_BASE
    assert tiny.config.d_model < base.config.d_model and tiny.config == started.config
    assert not tiny.initial_weights and started.initial_weights
    for task in made:
        assert task.data_summary.startswith("100 examples to learn from, ")
        assert task.selection == "chrf" and task.recipe.label_smoothing == 0.1


def test_a_model_that_misses_its_target_is_written_and_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = np.random.default_rng(0).integers(0, 2, 400)  # says nothing of a text
    (tmp_path / "rows.tsv").write_text(
        "".join(f"text {i}\t{'odd' if odd else 'even'}\n" for i, odd in enumerate(noise))
    )
    given = ["--file", str(tmp_path / "rows.tsv"), "--out", str(tmp_path / "out")]

    assert run(["train", "classification", *given, "--steps", "1"]) == 5

    printed = capsys.readouterr()
    assert f"checkpoint: {tmp_path / 'out'}" in printed.out
    assert "error: the model misses the target of its task; more --steps" in printed.err
    assert (tmp_path / "out" / "report.json").is_file()


UNSAID = {
    "name": None,
    "version": "1",
    "target": "cpu",
    "precision": "fp32",
    "weights": None,
    "kv_cache": None,
    "text": None,
    "proof": "standard",
}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"name": "poems", "version": "2026-11", "proof": "quick"},
        {"target": "cuda", "precision": "bf16", "weights": "int4", "kv_cache": "int8"},
    ],
)
def test_export_tells_how_far_it_is_and_passes_on_what_it_is_told(
    said: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, given = list[Any](), dict[str, Any]()

    def export(*_: Path, progress: Callable[[int, int], None], limits: object, **rest: Any) -> None:
        given.update(rest)
        progress(3, 8)
        raise CertificateError("another model")

    @contextmanager
    def noted(title: str) -> Iterator[Callable[[int, int], None]]:
        told.append(title)
        yield lambda *counts: told.append(counts)

    monkeypatch.setattr("exporter.export.export_package", export)
    monkeypatch.setattr("server.cli.models.packages.show_progress", noted)

    (tmp_path / "config.json").write_text('{"model": {}}')

    options = [f"--{name.replace('_', '-')}={value}" for name, value in said.items()]
    assert run(["export", str(tmp_path), "--out", str(tmp_path / "package"), *options]) == 1

    assert given == UNSAID | said
    assert told == ["Comparing with PyTorch", (3, 8)]


async def test_demo_asks_the_server_and_load_tests_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "LOAD_REQUESTS", 20)

    async with running_worker(FakeGenerator()) as (_, address):
        problems = await asyncio.to_thread(demo._use, address, tmp_path)

    assert all(" is " in problem for problem in problems), "answers are wrong, and nothing else"
    assert len(json.loads((tmp_path / demo.LAST).read_text())["records"]) == 20
    assert (tmp_path / "loadtest.html").is_file() and (tmp_path / "loadtest.png").is_file()
    assert "0 of 12 right" in capfd.readouterr().out


def test_demo_leaves_an_begun_run_of_another_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _begun_run("text", tmp_path / "checkpoint")

    assert run(["demo", "--out", str(tmp_path)]) == 3

    assert "holds a run of text, which is not this demo's" in capsys.readouterr().err
    assert (tmp_path / "checkpoint" / STATE_NAME).is_file()


def test_demo_goes_on_until_it_has_come_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed: list[bool] = []

    def train(build: object, out: Path, *, resume: bool, **_: object) -> None:
        resumed.append(resume)
        raise KeyboardInterrupt

    monkeypatch.setattr("exporter.training.trainer.train", train)
    assert run(["demo", "--out", str(tmp_path)]) == 130
    _begun_run("dates", tmp_path / "checkpoint")
    assert run(["demo", "--out", str(tmp_path)]) == 130
    assert "asked again, it goes on from there" in capsys.readouterr().err
    _begun_run("dates", tmp_path / "checkpoint", finished=True)
    assert run(["demo", "--out", str(tmp_path)]) == 130
    (tmp_path / "loadtest.json").touch()  # it had come to its end
    assert run(["demo", "--out", str(tmp_path)]) == 130

    assert resumed == [False, True, True, False]
    assert not (tmp_path / "loadtest.json").exists(), "this one has not"
    assert (tmp_path / "checkpoint" / STATE_NAME).is_file()


@pytest.mark.parametrize(
    "command",
    [
        ["demo", "--keep-serving", "--out", "{out}"],
        ["serve", "--model", "m=nowhere", "--port", "{port}"],
        ["serve", "--model", "m=nowhere", "--port", "{port}", "--verify", "{checkpoint}"],
        ["http", "--port", "{port}"],
        ["kserve", "--port", "{port}"],
    ],
)
def test_a_port_in_use_is_found_before_anything_else_is_done(
    command: list[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"out": tmp_path, "checkpoint": tmp_path_factory.mktemp("checkpoint")}
    (given["checkpoint"] / "config.json").write_text('{"model": {}}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("server.cli.demo._PORT", port)
        (looks_like_a_checkpoint := tmp_path / "config.json").write_text('{"model": {}}')

        assert run([word.format(port=port, **given) for word in command]) == 3

    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith(f"error: cannot listen on 127.0.0.1:{port}: Address already in use; stop")
    assert list(tmp_path.iterdir()) == [looks_like_a_checkpoint]


def test_demo_on_a_gpu_verifies_there_and_has_two_workers_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, Any]] = []
    trained = TrainingReport("dates", tmp_path, 1, 1, 0, 1.0, 1, {}, "good", True, ())

    def note(name: str) -> Callable[..., None]:
        return lambda *_, **options: done.append((name, options))

    monkeypatch.setattr("engine.cuda.device.open_device", note("open"))
    monkeypatch.setattr("exporter.training.trainer.train", lambda *_, **__: trained)
    monkeypatch.setattr("server.cli.demo.export_with_progress", note("export"))
    verified = "server.cli.demo.verify_apart"
    monkeypatch.setattr(verified, lambda *given: done.append(("verify", given)))
    monkeypatch.setattr("server.cli.demo.serve_until_ended", lambda c: done.append(("", c)))

    code = run(["demo", "--out", str(tmp_path), "--device", "cuda", "--keep-serving"])

    assert code == 0
    (opened, _), (exported, form), (verified, asked), (_, config) = done
    assert (opened, exported, verified) == ("open", "export", "verify")
    assert form == {"name": "dates", "target": "cuda", "precision": "fp16"}
    share = EngineConfig(max_num_seqs=0, device="cuda", gpu_memory_utilization=0.45)
    assert asked == (tmp_path / "package", tmp_path / "checkpoint", "cuda", share)
    assert (config.engine.min_replicas, config.engine.num_gpus_per_replica) == (2, 0.5)
    assert config.engine_config == EngineConfig(max_num_seqs=0, device="cuda")


def test_demo_without_a_gpu_is_refused_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.distributions._installed", lambda name: None)

    assert run(["demo", "--out", str(tmp_path), "--device", "cuda"]) == 3

    assert "pip install 'tokenweir[gpu]'" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("generate --model m x", "--timeout"),
        ("score --model m x y", "--timeout"),
        ("classify --model m x", "--timeout"),
        ("label --model m x", "--timeout"),
        ("loadtest --model m", "--timeout"),
        ("loadtest --model m", "--rate"),
        ("serve .", "--grace"),
        ("serve .", "--target-live-requests"),
        ("serve .", "--num-gpus-per-replica"),
        ("serve .", "--gpu-memory-utilization"),
        ("bench .", "--gpu-memory-utilization"),
        ("export . --out x", "--max-token-loss"),
        ("export . --out x", "--max-logit-loss"),
        ("export . --out x", "--max-perplexity-loss"),
    ],
)
def test_an_option_that_is_no_finite_number_is_refused_by_name(
    arguments: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments.split(), f"{option}={value}"]) == 2

    assert f"Invalid value for '{option}': {value} is not" in capsys.readouterr().err


def test_a_step_may_have_no_limit_but_not_none_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--max-step-seconds", "inf"]) == 2
    assert "give at least one MODEL" in capsys.readouterr().err

    assert run(["serve", "--max-step-seconds", "nan"]) == 2
    assert "'--max-step-seconds': nan is not a finite number." in capsys.readouterr().err
