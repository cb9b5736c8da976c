"""The first look: what is here, and what no step can beat."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.cuda.device import open_device
from loadtest.lab.gpu.part import Found, Outcome, Settings

_COPIED, _MATRIX, _TIMES = 2**32, 8192, 10


def look(settings: Settings) -> Outcome:
    """Return what is here."""
    found: Found = {}
    device = open_device() if settings.device == "cuda" else None
    said: str = settings.device
    if device is not None:
        free, total = device.runtime.free_memory()
        said = f"{device.gpu_name}, driver {device.driver}, {free / 1e9:.0f} GB free"
        found |= {"gpu": device.gpu_name, "driver": device.driver, "bytes": [free, total]}
        print(said, flush=True)
    if torch.cuda.is_available():
        found |= _ceilings()
        said += "; {bytes_per_second:.3g} bytes/s copied, {flops_per_second:.3g} FLOP/s in bf16"
        said = said.format(**found)
    elif device is not None:
        said += f"; torch {torch.__version__} sees no GPU: speed.* will fail"
    return Outcome(said, found)


def _ceilings() -> dict[str, float]:
    """Return what no step can beat; random numbers, as zeros are multiplied faster."""
    origin = torch.randn(_COPIED // 4, device="cuda")
    target = torch.empty_like(origin)
    left, right = torch.randn(2, _MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16)
    return {
        "bytes_per_second": 2 * _COPIED / _seconds(lambda: target.copy_(origin)),
        "flops_per_second": 2 * _MATRIX**3 / _seconds(lambda: left @ right),
    }


def _seconds(work: Callable[[], object]) -> float:
    for times in (3, _TIMES):  # the first warm up
        started = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / _TIMES
