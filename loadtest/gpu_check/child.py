"""The process of one part: `python -m loadtest.gpu_check.child TASK`, a JSON; writes a JSON."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.errors import TokenweirError
from loadtest.gpu_check.part import Outcome, Settings
from loadtest.result_file import write_document


def call(task: dict[str, Any]) -> Outcome:
    """Call the function of a part; what is found wrong comes back as an outcome."""
    module, _, name = task["run"].partition(":")
    given = task["settings"]
    settings = Settings(given["device"], given["quick"], Path(given["work"]))
    function = getattr(importlib.import_module(module), name)
    try:
        outcome: Outcome = function(settings, **task["arguments"])
    except TokenweirError as error:
        traceback.print_exc()
        return Outcome(str(error), {"error": type(error).__name__}, passed=False)
    return outcome


def elsewhere(run: str, settings: Settings, **arguments: str) -> Outcome:
    """Call a function of this package in one more process."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        answer = Path(directory) / "answer.json"
        subprocess.run(command_of(run, settings, arguments, answer), check=True)
        return Outcome(**json.loads(answer.read_text()))


def command_of(
    run: str, settings: Settings, arguments: Mapping[str, str], answer: Path
) -> list[str]:
    """Return what calls a function in a process of its own; its outcome is written to a file."""
    task: dict[str, Any] = {
        "run": run,
        "arguments": dict(arguments),
        "settings": {**asdict(settings), "work": str(settings.work)},
        "answer": str(answer),
    }
    return [sys.executable, "-m", "loadtest.gpu_check.child", json.dumps(task)]


def main(task: dict[str, Any]) -> None:
    """Run a task and write what came of it to the file that it names."""
    write_document(asdict(call(task)), Path(task["answer"]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
