"""The versions of libraries and the machine that a package is made and compared with."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from engine.machine import instruction_sets, l2_bytes, num_cores
from exporter.operators.domain import OPSET

_TOOLS = ("tokenweir", "torch", "onnx", "onnx-ir", "onnxscript", "tokenizers")
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")  # two distributions of one module


def read_toolchain() -> dict[str, str]:
    """Return what is installed here, and what this machine is to onnxruntime's kernels.

    Rows may be bit-equal with one number of threads, L2 size or instruction set, and not with
    another: a certificate holds for those that it was found with.
    """
    return {
        "python": platform.python_version(),
        "opset": str(OPSET),
        **dict(_versions()),
        "threads": str(num_cores()),
        "l2_bytes": str(l2_bytes() or "unknown"),
        "instruction_sets": " ".join(instruction_sets()) or "unknown",
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in (*_TOOLS, *_RUNTIMES):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
