"""Runs parts of the check of a GPU on the emulated device; prints its exit code and results.

Takes names of parts, "a,b", or "" for all, the directory where their models are kept, and after how
many seconds a part is ended.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path

from loadtest.gpu_check.__main__ import main

with tempfile.TemporaryDirectory() as directory:
    out = Path(directory)
    with contextlib.redirect_stdout(sys.stderr):
        only = ["--only", sys.argv[1]] if sys.argv[1] else []
        limit = ["--limit", sys.argv[3]]
        code = main(["--out", directory, "--quick", "--work", sys.argv[2], *limit, *only])
    sys.stderr.write((out / "log.txt").read_text())  # the parts', each a process
    print(
        json.dumps(
            {
                "code": code,
                "results": json.loads((out / "results.json").read_text()),
                "table": (out / "table.txt").read_text(),
            }
        )
    )
