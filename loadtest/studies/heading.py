"""What every result file begins with."""

from __future__ import annotations

import shlex
import sys

from engine.machine import machine_name
from loadtest.origin import code_commit, now, versions_of

# What a figure may depend on.
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
    "uvloop",
)


def heading(module: str) -> dict[str, object]:
    """Return the command of a module, the commit, the time, the machine, the versions."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": code_commit(),
        "written_at": now(),
        "machine": machine_name(),
        "versions": versions_of(*_DISTRIBUTIONS),
    }
