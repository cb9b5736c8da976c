"""Device memory through the library of CUDA itself, on the emulated device."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from engine.cuda.libraries import _CUDA_LIBRARIES
from tests.emulated.conftest import WHEEL, RunScript

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]


def test_memory_is_copied_through_the_library(on_device: RunScript) -> None:
    found = on_device("copy_memory.py")

    assert found["name"] == "EMULATED sm_90" and found["driver"] == "13.0"
    assert found["stream"] != 0
    assert found["there_and_back"] and found["pinned"] and found["cleared"]
    assert "cudaMalloc failed with" in found["too_much"] and "are free" in found["too_much"]


def test_random_changes_of_rows_are_those_of_the_host(on_device: RunScript) -> None:
    assert on_device("change_rows.py") == {"fp32": 300, "fp16": 300, "bf16": 300, "int8": 300}


def test_the_provider_is_linked_to_the_libraries_that_are_looked_for_at_the_start(
    device: Path,
) -> None:
    """Those that the extra brings; the driver brings libcuda.so.1."""
    provider = WHEEL / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"

    done = subprocess.run(["readelf", "-d", provider], capture_output=True, text=True, check=True)

    needed = re.findall(r"\(NEEDED\).*\[(lib(?:cu|nv)[^]]*)\]", done.stdout)
    assert {*needed} == {*_CUDA_LIBRARIES, "libcuda.so.1"}
