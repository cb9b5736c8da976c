"""The first five minutes of a new user, typed in the README's order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.cli.app import run
from tests.fakes.hub import fake_hub
from tests.fakes.real_model import download_minilm

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "README.md").read_text().partition("## Five minutes\n")[2].partition("\n## ")[0]
FIRST, SECOND = re.findall(r"^```sh\n(.*?)^```$", SECTION, re.M | re.S)
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", SECTION, re.M | re.S)
EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
INSTALLED = ("make install", ". .venv/bin/activate")  # the tests run where that is done


def _lines(script: str) -> list[str]:
    return [line for line in script.splitlines() if not line.startswith(INSTALLED)]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Give the commands of this environment, and of this tree."""
    programs = tmp_path / "programs"
    programs.mkdir()
    command = programs / "tokenweir"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{_MAIN}' \"$@\"\n")
    command.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    tree = os.pathsep.join(entry for entry in sys.path if entry)
    cache = {"TOKENWEIR_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hub")}
    return {**os.environ, **cache, "PATH": path, "PYTHONPATH": tree}


_MAIN = f"from {run.__module__.rpartition('.')[0]} import main; main()"


@contextmanager
def _running(line: str, environment: dict[str, str], folder: Path) -> Iterator[None]:
    """Type a command that goes on; wait until it says that it serves, and end it with Ctrl-C."""
    log = folder / "serve.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["sh", "-c", f"exec {line}"], cwd=folder, env=environment, stdout=file, stderr=file
        )
    try:
        ends = time.monotonic() + 400  # it builds packages first
        while b"Ctrl-C stops" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < ends, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()  # drained


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_first_five_minutes_go_as_the_readme_says(
    environment: dict[str, str], tmp_path: Path
) -> None:
    def typed(script: str) -> str:
        ended = subprocess.run(
            ["sh", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True
        )
        assert ended.returncode == 0, ended.stderr.decode()
        return ended.stdout.decode()

    *before, serve = _lines(FIRST)
    assert serve.startswith("tokenweir serve")

    typed("\n".join(before))
    with fake_hub({EMBEDDER: download_minilm(tmp_path / "wheel")}) as hub:
        environment["HF_ENDPOINT"] = hub
        with _running(serve, environment, tmp_path):
            asked = typed("\n".join(_lines(SECOND)))
            answered = []
            for program in PROGRAMS:
                (tmp_path / "ask.py").write_text(program)
                answered.append(typed(f"{sys.executable} ask.py").split())

    assert "1998-02-03" in asked and "2004-07-07" in asked and "2031-10-14" in asked
    (date, width), (streamed, similarity) = answered
    assert date == streamed == "1998-02-03"
    assert int(width) == 384 and 0.5 < float(similarity) < 1
