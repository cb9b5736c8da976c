"""The process of a part, or of a package that is made: `child.py TASK ANSWER`, a JSON each."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.errors import TokenweirError
from loadtest.errors import LoadTestError
from loadtest.lab.gpu import parts
from loadtest.lab.gpu.part import Outcome, Settings
from loadtest.result_file import write_document


def command_of(settings: Settings, cores: Sequence[int], answer: Path, **what: str) -> list[str]:
    """Return what runs `part=NAME`, or makes `package=NAME`, on some cores of this machine."""
    task = {"settings": {**asdict(settings), "work": str(settings.work)}, "cores": list(cores)}
    return [sys.executable, "-m", __name__, json.dumps(task | what), str(answer)]


def main(task: dict[str, Any], answer: Path) -> None:
    """Do a task, and write what came of it; what is found to be wrong is an outcome as well."""
    os.sched_setaffinity(0, task["cores"])
    given = task["settings"]
    concurrencies = tuple(given["concurrencies"])
    settings = Settings(**given | {"work": Path(given["work"]), "concurrencies": concurrencies})
    try:
        if "part" in task:
            outcome = parts.run(task["part"], settings)
        else:
            from loadtest.lab.gpu.models import make_package

            outcome = Outcome(str(make_package(settings, task["package"])), passed=True)
    except (TokenweirError, LoadTestError) as error:
        traceback.print_exc()
        outcome = Outcome(str(error), {"error": type(error).__name__}, passed=False)
    write_document(asdict(outcome), answer)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
