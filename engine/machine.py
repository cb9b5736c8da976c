"""The machine's processor, the instructions that kernels use, its cache and memory."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# onnxruntime chooses its kernels by these; the names are Linux's.
_INSTRUCTION_SETS = (
    "avx",
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # in malloc.h of glibc
_LARGE_BLOCK = 2**20  # bytes
_MOST_AT_HAND = 2**25  # bytes that are free at the end of the heap
_UNITS = {"": 1, "K": 2**10, "M": 2**20}


def machine_name() -> str:
    """Return what results call this machine: its processor and the number of its cores."""
    name = _cpuinfo("model name") or platform.processor()
    return f"{name}, {os.cpu_count()} cores"


def processor_kind() -> str:
    """Return what the bits of a result may depend on: processor, instructions, cache."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    cache = l2_bytes()
    sets = " ".join(instruction_sets()) or "instruction sets unknown"
    return f"{name}; {sets}; L2 {'unknown' if cache is None else cache}"


def num_cores() -> int:
    """Return how many cores this process may use: those it is bound to, within its CPU quota."""
    bound, quota = _bound_cores(), _cpu_quota()
    return bound if quota is None else min(bound, math.ceil(quota))


def quota_notice() -> str | None:
    """Return one line about a CPU quota that is below the cores of this process; else None."""
    bound, quota = _bound_cores(), _cpu_quota()
    if quota is None or quota >= bound:
        return None
    return f"the CPU quota is {quota:g} of {bound} cores, counted as {num_cores()}"


def l2_bytes() -> int | None:
    """Return the size of a core's second-level cache; None if the system does not tell."""
    try:
        for cache in sorted(_CACHES.glob("index*")):
            if (cache / "level").read_text().strip() == "2":
                return _bytes((cache / "size").read_text().strip())
    except OSError:
        pass
    return None


def free_memory() -> int:
    """Return how many bytes may still be taken."""
    for line in _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else ():
        if line.startswith("MemAvailable:"):  # includes reclaimable memory
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_large_blocks_at_once() -> None:
    """Let glibc give large blocks back to the system when they are freed, in all of this process.

    By itself it keeps what had up to 32 MiB for others, though it may be in pieces for long.
    """
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):  # other libraries have none
        set_option(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        set_option(_M_TRIM_THRESHOLD, _MOST_AT_HAND)


def give_back_freed_memory() -> None:
    """Let glibc give back what is free between blocks in use: half a model that was traced."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def instruction_sets() -> tuple[str, ...]:
    """Return those of the processor that decide which kernels run; () if it does not tell."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return tuple(name for name in _INSTRUCTION_SETS if name in flags)


def _bound_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_quota() -> float | None:
    """Return of how many cores this process has the time; None if nothing limits it.

    The smallest quota counts, of its control group and all that this one is in.
    """
    try:
        quotas = [quota for group in _control_groups() if (quota := _quota_of(group)) is not None]
    except (OSError, ValueError):  # another system, or one that does not tell
        return None
    return min(quotas, default=None)


def _control_groups() -> Iterator[Path]:
    """Yield the folders of the groups of this process that limit its CPU: cgroup v1's and v2's."""
    paths = {}
    for line in (_ROOT / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for line in (_ROOT / "proc/self/mountinfo").read_text(errors="replace").splitlines():
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        shown, place = mount.split()[3:5]  # a container may see a part of the tree only
        group = Path(os.path.relpath(paths[kind], shown))
        top = _ROOT / place.lstrip("/")
        yield from (top / part for part in (group, *group.parents))


def _quota_of(group: Path) -> float | None:
    try:
        if (file := group / "cpu.max").exists():
            words = file.read_text().split()
        else:
            words = [(group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
        quota, period = (int(word) for word in words)
    except (OSError, ValueError):  # it has none: -1, "max", or no such file
        return None
    return quota / period if quota > 0 else None


def _cpuinfo(key: str) -> str:
    """Return what the system says of its first core; "" if it does not."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _bytes(size: str) -> int | None:
    match = re.fullmatch(r"(\d+)([KM]?)", size)
    return int(match[1]) * _UNITS[match[2]] if match else None
