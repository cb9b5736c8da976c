"""Device memory through the library of CUDA itself, on the emulated device."""

from __future__ import annotations

import pytest

from tests.emulated.conftest import RunScript

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]


def test_memory_is_copied_through_the_library(on_device: RunScript) -> None:
    found = on_device("copy_memory.py")

    assert found["name"] == "EMULATED sm_90" and found["driver"] == "13.0"
    assert found["stream"] != 0
    assert found["there_and_back"] and found["pinned"] and found["cleared"]
    assert "cudaMalloc failed with" in found["too_much"] and "are free" in found["too_much"]


def test_random_changes_of_rows_are_those_of_the_host(on_device: RunScript) -> None:
    assert on_device("change_rows.py") == {"fp32": 300, "fp16": 300, "bf16": 300, "int8": 300}
