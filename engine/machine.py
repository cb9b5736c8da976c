"""What the machine is: its processor, its second-level cache, the instructions that kernels use."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# By which onnxruntime chooses its kernels, as Linux calls them.
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
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def l2_bytes() -> int | None:
    """Return the size of a core's second-level cache; None if the system does not tell."""
    try:
        for cache in sorted(_CACHES.glob("index*")):
            if (cache / "level").read_text().strip() == "2":
                return _bytes((cache / "size").read_text().strip())
    except OSError:
        pass
    return None


def instruction_sets() -> tuple[str, ...]:
    """Return those of the processor that decide which kernels run; () if it does not tell."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return tuple(name for name in _INSTRUCTION_SETS if name in flags)


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
