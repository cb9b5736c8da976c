"""The emulated device: builds it, and runs a script in a process that sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WHEEL = ROOT / ".emulated"  # where `make test-emulated` puts onnxruntime-gpu
SOURCES = Path(__file__).parent / "device"
# Libraries that the provider is linked to; what it calls of them is in the preloaded one.
EMPTY = ("libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10", "libcudart.so.13")

RunScript = Callable[..., Any]


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the emulated device; return the directory of its libraries."""
    if not (WHEEL / "onnxruntime").is_dir():
        pytest.fail(f"{WHEEL} does not hold onnxruntime-gpu; run `make test-emulated`")
    out = tmp_path_factory.mktemp("device")
    headers = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    sources = [str(SOURCES / f"emulated_{name}.c") for name in ("cuda", "rest")]
    _compile("-O1", f"-I{headers}", "-o", str(out / "emulated_cuda.so"), *sources)
    _compile(
        *("-Wl,-soname,libcuda.so.1", "-o", str(out / "libcuda.so.1")),
        str(SOURCES / "emulated_driver.c"),
    )
    empty = out / "empty.c"
    empty.write_text("int tokenweir_stand_in;\n")
    for name in EMPTY:
        # Who looks for functions in the library itself finds them in what it needs.
        needed = ("-Wl,--no-as-needed", str(out / "emulated_cuda.so"))
        _compile(f"-Wl,-soname,{name}", "-o", str(out / name), str(empty), *needed)
    return out


@pytest.fixture(scope="session")
def on_device(device: Path) -> RunScript:
    """Run a script of this folder beside the emulated device; return the JSON that it prints."""

    def run(script: str, *arguments: str) -> Any:
        path = [str(WHEEL), str(ROOT), str(ROOT / "proto" / "python")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "LD_LIBRARY_PATH": str(device),
            "LD_PRELOAD": str(device / "emulated_cuda.so"),
        }
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        # Such a copy is repeated from memory of the host that is another's by then.
        assert "while capturing" not in done.stderr and "ILLEGAL" not in done.stderr, done.stderr
        return json.loads(done.stdout)

    return run


def _compile(*arguments: str) -> None:
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", *arguments], check=True)
