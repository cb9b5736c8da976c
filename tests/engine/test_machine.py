"""What the system tells of its processor is read, and what it does not tell is no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import machine
from engine.machine import instruction_sets, l2_bytes, machine_name

X86 = """processor\t: 0
model name\t: Some Processor 9000
flags\t\t: fpu avx avx2 avx512f avx512_vnni amx_int8 rdrand

processor\t: 1
model name\t: Some Processor 9000
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "_CACHES", tmp_path)
    return tmp_path


def _write_cache(system: Path, index: int, level: str, size: str) -> None:
    (system / f"index{index}").mkdir()
    (system / f"index{index}" / "level").write_text(f"{level}\n")
    (system / f"index{index}" / "size").write_text(f"{size}\n")


def test_instruction_sets_and_name_are_those_of_the_first_core(system: Path) -> None:
    (system / "cpuinfo").write_text(X86)

    assert instruction_sets() == ("avx", "avx2", "avx512f", "avx512_vnni", "amx_int8")
    assert machine_name().startswith("Some Processor 9000, ")


def test_instruction_sets_of_arm_are_called_features(system: Path) -> None:
    (system / "cpuinfo").write_text(ARM)

    assert instruction_sets() == ("asimd", "asimddp", "i8mm")


@pytest.mark.parametrize(
    ("size", "expected"), [("2048K", 2**21), ("1M", 2**20), ("512", 512), ("?", None)]
)
def test_l2_is_the_cache_of_the_second_level(system: Path, size: str, expected: int | None) -> None:
    _write_cache(system, 0, "1", "48K")
    _write_cache(system, 2, "2", size)

    assert l2_bytes() == expected


def test_a_system_that_tells_nothing_is_no_error(system: Path) -> None:
    assert (instruction_sets(), l2_bytes()) == ((), None)
    assert machine_name().endswith(" cores")
