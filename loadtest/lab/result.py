"""Result files: what every one begins with, and how it is written."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from engine.machine import machine_name
from loadtest.origin import code_commit, now, versions_of
from loadtest.result_file import write_document

# Distributions that a figure may depend on.
_DISTRIBUTIONS = (
    "grpcio",
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "prometheus_client",
    "protobuf",
    "ray",
    "tokenizers",
    "torch",
    "transformers",
    "uvloop",
)


def heading() -> dict[str, object]:
    """Return the command of this process, the commit, the time, the machine, the versions."""
    return {
        "command": shlex.join(["python", "-m", "loadtest.lab", *sys.argv[1:]]),
        "commit": code_commit(),
        "written_at": now(),
        "machine": machine_name(),
        "versions": versions_of(*_DISTRIBUTIONS),
    }


def write_result(content: Mapping[str, object], out: Path) -> Path:
    """Write what a study has found, behind its heading, as OUT.json; return that."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_document({**heading(), **content}, path := out.with_suffix(".json"))
    return path
