"""The emulated device: builds it, and runs a script in a process that sees it."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.package.graph_io import SAMPLING_GRAPHS
from engine.package.manifest import Precision
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.sampling_graphs import sampling_graphs
from exporter.graphs.target import CUDA
from exporter.models import TransformerConfig, build_model
from tests.emulated.models import MODELS
from tests.fakes.traces import Trace, traced  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[2]
WHEEL = ROOT / ".emulated"  # make puts onnxruntime-gpu here, and the headers of CUDA beside it
HEADERS = WHEEL / "headers" / "nvidia" / "cu13" / "include"
SOURCES = Path(__file__).parent / "device"
OFFLINE = Path(__file__).parent / "offline"
# Libraries that the provider is linked to; what it calls of them is in the preloaded one.
EMPTY = ("libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10", "libcudart.so.13")

RunScript = Callable[..., Any]
Export = Callable[..., list[str]]


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the emulated device; return the directory of its libraries."""
    for path in (WHEEL / "onnxruntime", HEADERS / "cuda_runtime_api.h"):
        if not path.exists():
            pytest.skip(f"no {path}: pip has not brought it; `make test-emulated` says why")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc, which builds the emulated device: install it")
    out = tmp_path_factory.mktemp("device")
    sources = [str(SOURCES / f"emulated_{name}.c") for name in ("cuda", "rest")]
    _compile("-O1", f"-I{HEADERS}", "-o", str(out / "emulated_cuda.so"), *sources)
    _compile(
        *("-Wl,-soname,libcuda.so.1", "-o", str(out / "libcuda.so.1")),
        str(SOURCES / "emulated_driver.c"),
    )
    empty = out / "empty.c"
    empty.write_text("int tokenweir_stand_in;\n")
    for name in EMPTY:
        # Lookups of functions in the library itself find them in what it needs.
        needed = ("-Wl,--no-as-needed", str(out / "emulated_cuda.so"))
        _compile(f"-Wl,-soname,{name}", "-o", str(out / name), str(empty), *needed)
    return out


@pytest.fixture(scope="session")
def on_device(device: Path) -> RunScript:
    """Run a script of this folder beside the emulated device; return the JSON that it prints.

    With `libraries` it finds those of another directory.
    """

    def run(
        script: str, *arguments: str, timeout: float = 240, libraries: Path | None = None
    ) -> Any:
        path = [str(OFFLINE), str(WHEEL), str(ROOT), str(ROOT / "proto" / "python")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "LD_LIBRARY_PATH": str(libraries or device),
            "LD_PRELOAD": str(device / "emulated_cuda.so"),
        }
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        # Such a copy is repeated from memory of the host that is another's by then.
        assert "while capturing" not in done.stderr and "ILLEGAL" not in done.stderr, done.stderr
        assert "reaches for the network" not in done.stderr, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def draw_paths(
    device: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[str]]:
    """Write the graphs for draws, which are the same of all models with as many tokens."""

    @functools.cache
    def write(vocab_size: int) -> list[str]:
        directory = tmp_path_factory.mktemp("draws")
        write_graphs(sampling_graphs(vocab_size), directory)
        return [str(directory / name) for name in SAMPLING_GRAPHS]

    return write


@pytest.fixture(scope="session")
def export(
    device: Path,
    tmp_path_factory: pytest.TempPathFactory,
    traced: Trace,  # noqa: F811 - the fixture
) -> Export:
    """Export one of the models for CUDA, once in a run; return the paths of its graphs."""

    @functools.cache
    def write(name: str, precision: Precision, **options: Any) -> list[str]:
        torch.manual_seed(0)
        model = build_model(TransformerConfig.of({**MODELS[name], **options})).eval()
        directory = tmp_path_factory.mktemp(name)
        graphs = traced(model, target=CUDA, precision=precision)
        write_graphs(graphs, directory)
        return [str(directory / file) for file in graphs]

    return write


def _compile(*arguments: str) -> None:
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", *arguments], check=True)
