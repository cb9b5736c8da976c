"""The command line: help, exit codes, messages; the calls go to a scripted worker."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from server.cli import app
from server.cli.app import cli, run

HEAVY = ("torch", "ray", "onnxruntime", "grpc", "numpy", "matplotlib", "transformers")


def test_help_imports_nothing_heavy_and_comes_at_once() -> None:
    code = (
        "import sys; from server.cli.app import run; run(['--help'])\n"
        f"assert not set({HEAVY!r}) & set(sys.modules), sorted(sys.modules)"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        times.append(time.perf_counter() - start)

    assert done.returncode == 0, done.stderr
    assert min(times) < 0.5


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["train", "poems", "--out", "x"], "'poems' is not one of"),
        (["train", "text", "--out", "x"], "give --file FILE"),
        (["train", "dates", "--out", "x", "--file", __file__], "`dates` makes its own data"),
        (["serve"], "give at least one PACKAGE"),
        (["serve", "--model", "dates"], "--model 'dates' is not NAME=PATH"),
        (["serve", "--model", "a=x", "--model", "a=y"], "would be model 'a'"),
        (["serve", ".", "--replicas", "2", "--min-replicas", "1"], "give --replicas, or"),
        (["serve", ".", "--min-replicas", "3", "--max-replicas", "2"], "is above --max-replicas"),
        (["generate", "text"], "Missing option '--model'"),
        (["loadtest", "--model", "m", "--rate", "1", "--concurrency", "1"], "give --rate for"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2

    assert message in capsys.readouterr().err


def test_an_error_is_one_line_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", str(tmp_path)]) == 1

    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "has no manifest.json" in err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied\n"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device\n"),
        (ModuleNotFoundError("x", name="torch"), 1, "pip install 'tokenweir[export]'"),
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

    assert run(["models", "--server", f"127.0.0.1:{port}"]) == 1
    assert f"error: no server answers at 127.0.0.1:{port}" in capsys.readouterr().err
