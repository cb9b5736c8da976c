"""Runs parts of the check of a GPU on the emulated device; prints its exit code and results.

Takes names of parts, "a,b", or "" for all, and the directory where their models are kept.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path

from loadtest.lab.gpu.command import main


def check(only: str, work: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        arguments = ["--out", directory, "--work", work, "--quick", "--slower", "20"]
        arguments += ["--budget", "99999", "--rounds", "1", "--concurrency", "1,3"]
        code: object = 0
        with contextlib.redirect_stdout(sys.stderr):
            try:
                main([*arguments, *(["--only", only] if only else [])])
            except SystemExit as ended:
                code = ended.code
        sys.stderr.write((out / "log.txt").read_text())  # the parts', each a process
        results = json.loads((out / "results.json").read_text())
        print(
            json.dumps({"code": code, "results": results, "table": (out / "table.txt").read_text()})
        )


if __name__ == "__main__":  # parts are processes that import this file
    check(*sys.argv[1:])
