"""Facts that the system gives of its processor are read, and missing ones are no error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine import machine
from engine.machine import (
    free_large_blocks_at_once,
    free_memory,
    give_back_freed_memory,
    instruction_sets,
    l2_bytes,
    machine_name,
    num_cores,
    quota_notice,
)

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
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_CACHES", tmp_path)
    return tmp_path


def _write_cache(system: Path, index: int, level: str, size: str) -> None:
    (system / f"index{index}").mkdir()
    (system / f"index{index}" / "level").write_text(f"{level}\n")
    (system / f"index{index}" / "size").write_text(f"{size}\n")


def test_memory_that_the_system_would_give_up_is_free(system: Path) -> None:
    assert free_memory() > 2**20  # a system that names no reclaimable memory

    (system / "meminfo").write_text("MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable: 3 kB\n")

    assert free_memory() == 3 * 1024


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


V1 = {"": "-1 100000", "docker/1": "150000 100000", "docker/1/job": "-1 100000"}
V2 = {"pods": "300000 100000", "pods/7": "100000 100000", "pods/7/job": "max 100000"}


@pytest.mark.parametrize(
    ("version", "group", "shown", "quotas", "cores"),
    [
        ("2", "/pods/7/job", "/", V2, 1),
        ("2", "/pods", "/", V2, 3),
        ("2", "/", "/", V2, 8),
        ("2", "/", "/", {"": "20000 100000"}, 1),  # in a namespace of its own
        ("2", "/", "/", {"": "900000 100000"}, 8),
        ("2", "/../elsewhere", "/", {"": "120000 50000"}, 3),
        ("1", "/docker/1/job", "/", V1, 2),
        ("1", "/docker/1", "/docker/1", {"": "250000 100000"}, 3),  # a container sees its part only
        ("1", "/docker", "/", V1, 8),
    ],
)
def test_cores_are_those_whose_time_the_smallest_cpu_quota_gives(
    version: str,
    group: str,
    shown: str,
    quotas: dict[str, str],
    cores: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    groups = {"1": f"4:cpu,cpuacct:{group}\n2:memory:/other\n", "2": f"0::{group}\n"}
    mounts = {"1": "cgroup cgroup rw,cpu,cpuacct", "2": "cgroup2 cgroup2 rw,nsdelegate"}
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups[version])
    (tmp_path / "proc/self/mountinfo").write_text(
        f"22 1 8:1 / / rw,relatime - ext4 /dev/vda rw\n"
        f"31 22 0:27 {shown} /sys/fs/cgroup rw,nosuid shared:9 - {mounts[version]}\n"
    )
    for name, quota in quotas.items():
        place = tmp_path / "sys/fs/cgroup" / name
        place.mkdir(parents=True, exist_ok=True)
        parts = {"cpu.max": quota}
        if version == "1":
            parts = dict(zip(("cpu.cfs_quota_us", "cpu.cfs_period_us"), quota.split(), strict=True))
        for file, content in parts.items():
            (place / file).write_text(f"{content}\n")

    assert num_cores() == cores
    notice = quota_notice()
    assert (notice or "")[-12:] == ("" if cores == 8 else f"counted as {cores}")


def test_cores_of_a_system_without_control_groups_are_those_it_is_bound_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})

    assert (num_cores(), quota_notice()) == (3, None)


STATUS = Path("/proc/self/status")


def resident() -> int:
    """Return how many bytes this process has in memory."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(not STATUS.exists(), reason="the system does not tell")
def test_freed_blocks_between_others_take_no_memory() -> None:
    large, small = 6 * 2**20, 2**19
    free_large_blocks_at_once()
    blocks = [np.ones(large, np.uint8) for _ in range(20)]
    before = resident()

    del blocks[::2]

    assert before - resident() > 8 * large

    blocks = [np.ones(small, np.uint8) for _ in range(200)]
    before = resident()
    del blocks[::2]

    give_back_freed_memory()

    assert before - resident() > 80 * small
