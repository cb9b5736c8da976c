"""A command that is interrupted says nothing of its insides, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.scripted_server import scripted_server, stream_messages

MAIN = "import sys; from server.cli import main; sys.argv[0] = 'tokenweir'; main()"


def _start(code: str, *arguments: str, own_group: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0 if own_group else None,
    )


def _interrupted_in_an_import(module: str, number: signal.Signals = signal.SIGINT) -> str:
    return f"""
import signal, sys
class Tripwire:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal({int(number)})
sys.meta_path.insert(0, Tripwire())
{MAIN}
"""


@pytest.mark.parametrize(
    "module",
    ["click", "engine.errors", "torch", pytest.param("exporter.export", marks=pytest.mark.long)],
)
def test_interrupted_in_an_import_a_command_ends_at_once_without_a_word(
    module: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model": {}}')
    code = _interrupted_in_an_import(module)
    process = _start(code, "export", str(tmp_path), "--out", str(tmp_path / "package"))

    out, err = process.communicate(timeout=240)

    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize(("code", "last"), [(130, "at exit\n"), (0, "at exit\ntaken apart\n")])
def test_an_interrupted_process_is_not_taken_apart(code: int, last: str) -> None:
    """torch takes seconds to be; what is registered for the exit is called."""
    program = f"""
import atexit, sys
class Slow:
    def __del__(self, write=sys.stdout.write):
        write("taken apart\\n")
sys.slow = Slow()
import server.cli.app
def run():
    atexit.register(print, "at exit")
    return {code}
server.cli.app.run = run
"""
    command = [sys.executable, "-c", program + MAIN]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (code, last, "")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_what_is_cleaned_up_is_cleaned_up_at_every_signal(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    working = f"""
import signal, sys
from pathlib import Path
import click
from server.cli import app
from server.cli.interruption import cleaned_up
from exporter.files import stage

def work():
    with cleaned_up(), stage(Path({str(tmp_path / "package")!r})):
        signal.raise_signal({number})

app.cli.commands["models"] = click.Command("models", callback=work)
{MAIN}
"""
    process = _start(working, "models")

    out, err = process.communicate(timeout=240)

    assert (process.returncode, out, err) == (code, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    ignoring = f"""
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
import click
from server.cli import app
from server.cli.interruption import cleaned_up

def work():
    with cleaned_up():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)

app.cli.commands["models"] = click.Command("models", callback=work)
{MAIN}
"""
    process = _start(ignoring, "models")

    _, err = process.communicate(timeout=240)

    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)],
)
def test_loadtest_reports_what_it_has_when_it_is_interrupted(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """The server itself interrupts the load test, at the 20th request."""
    file = tmp_path / "new" / "run.json"
    with scripted_server() as server:
        started: list[int] = []

        def answer(request, context):
            started.append(1)
            if len(started) == 20:
                process.send_signal(number)
                context.add_callback(done.set)
                done.wait(60)
            yield from stream_messages(["a"])

        done = threading.Event()
        server.answers["GenerateStream"] = answer
        process = _start(
            MAIN,
            *("loadtest", "--model", "m", "--server", server.address, "--requests", "100000"),
            *("--concurrency", "1", "--json", str(file)),
        )
        out, err = process.communicate(timeout=240)

    assert process.returncode == code, err
    report = json.loads(file.read_text())
    assert report["interrupted"] is True
    assert len(report["records"]) == report["summary"]["num_ok"] == 18  # without the warm-up
    assert "interrupted: 18 of 100000 requests had ended" in " ".join(out.split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (1, ("--requests", "9")),  # the one that warms up
        pytest.param(  # an answer asked again
            30,
            ("--requests", "20", "--concurrency", "2", "--verify", "1"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            40,
            ("--requests", "100000", "--concurrency", "4", "--processes", "2"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_load_test_that_is_interrupted_at_any_moment_leaves_a_result(
    call: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    json_file, html_file = tmp_path / "run.json", tmp_path / "run.html"
    with scripted_server() as server:
        calls: list[int] = []
        done = threading.Event()

        def answer(request, context):
            calls.append(1)
            if len(calls) == call:
                process.send_signal(signal.SIGINT)
                context.add_callback(done.set)
                done.wait(60)
            yield from stream_messages(["a"])

        server.answers["GenerateStream"] = answer
        process = _start(
            MAIN,
            *("loadtest", "--model", "m", "--server", server.address, *options),
            *("--json", str(json_file), "--html", str(html_file)),
        )
        _, err = process.communicate(timeout=240)

    assert process.returncode == 130, err
    assert "Traceback" not in err
    report = json.loads(json_file.read_text())
    assert report["interrupted"] is True
    assert len(report["records"]) == report["summary"]["num_ok"]
    assert bool(report["records"]) == (call > 1)
    assert "interrupted: " in html_file.read_text()


def test_a_load_test_that_is_interrupted_before_its_first_call_leaves_a_result(
    tmp_path: Path,
) -> None:
    files = tmp_path / "run.json", tmp_path / "run.html"
    process = _start(
        _interrupted_in_an_import("loadtest.runner", signal.SIGTERM),
        *("loadtest", "--model", "m", "--server", "127.0.0.1:1", "--sweep", "10,20"),
        *("--json", str(files[0]), "--html", str(files[1])),
    )

    _, err = process.communicate(timeout=240)

    assert (process.returncode, err) == (143, "")
    report = json.loads(files[0].read_text())
    assert report["interrupted"] is True and report["trials"] == []
    assert "interrupted: " in files[1].read_text()


def _senders(process: subprocess.Popen[str]) -> list[Path]:
    """Return the folders below /proc of the processes that a load test has started to send."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    folders = [Path("/proc", pid) for pid in children]
    return [folder for folder in folders if "spawn_main" in (folder / "cmdline").read_text()]


def _imports(process: subprocess.Popen[str]) -> bool:
    """Say whether one of them is in the midst of its imports."""
    return any("numpy" in (folder / "maps").read_text() for folder in _senders(process))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "begun",
    [
        pytest.param(
            lambda process, calls: bool(_senders(process)), marks=pytest.mark.long, id="started"
        ),
        pytest.param(lambda process, calls: _imports(process), id="imports"),
        pytest.param(lambda process, calls: len(calls) > 40, id="sends"),
    ],
)
def test_a_terminal_that_interrupts_all_processes_of_a_load_test_leaves_its_result(
    begun: Callable[[subprocess.Popen[str], list[int]], bool],
    number: signal.Signals,
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.json"
    with scripted_server() as server:
        calls: list[int] = []

        def answer(request, context):
            calls.append(1)
            return stream_messages(["a"])

        server.answers["GenerateStream"] = answer
        process = _start(
            MAIN,
            *("loadtest", "--model", "m", "--server", server.address, "--rate", "200"),
            *("--duration", "300", "--processes", "2", "--json", str(file)),
            own_group=True,
        )
        while not begun(process, calls):
            assert process.poll() is None, process.communicate()
            time.sleep(0.001)
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=60)

    said = [line for line in err.splitlines() if " of 300 s, " not in line]  # on a slow machine
    assert (process.returncode, said) == (128 + number, [])
    report = json.loads(file.read_text())
    assert report["interrupted"] is True
    assert len(report["records"]) == report["summary"]["num_ok"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_tracker_of_shared_memory_outlives_a_signal_to_all(number: signal.Signals) -> None:
    code = f"""
import os
from multiprocessing.resource_tracker import _resource_tracker
from loadtest.interruption import unheard_by_children
with unheard_by_children():
    pass
os.kill(_resource_tracker._pid, {int(number)})
os.close(_resource_tracker._fd)  # it ends here by itself
_, status = os.waitpid(_resource_tracker._pid, 0)
print(status)
"""
    process = _start(code)

    assert process.communicate(timeout=60) == ("0\n", "")


@pytest.mark.long
def test_a_search_that_is_interrupted_leaves_its_trials(tmp_path: Path) -> None:
    file = tmp_path / "search.json"
    with scripted_server() as server:
        calls: list[int] = []
        done = threading.Event()

        def answer(request, context):
            calls.append(1)
            if len(calls) == 60:
                process.send_signal(signal.SIGINT)
                context.add_callback(done.set)
                done.wait(60)
            yield from stream_messages(["a"])

        server.answers["GenerateStream"] = answer
        load = ("--rate", "20", "--duration", "1", "--arrival", "constant", "--slo", "e2e=60s")
        process = _start(
            MAIN,
            *("loadtest", "--model", "m", "--server", server.address, "--search", *load),
            *("--json", str(file)),
        )
        _, err = process.communicate(timeout=240)

    assert process.returncode == 130, err
    report = json.loads(file.read_text())
    assert report["interrupted"] is True and report["search"]["stopped"]
    assert len(report["trials"]) >= 1
