"""How busy a GPU is: the share of time in which a kernel ran, as NVML samples it."""

from __future__ import annotations

import ctypes
import statistics
import threading
from functools import cache
from types import TracebackType
from typing import Self

from engine.cuda.libraries import load_cuda_libraries
from engine.cuda.nvml import open_nvml
from engine.cuda.runtime import load_functions
from engine.errors import TokenweirError

_SECONDS = 0.1  # between two looks; NVML's own sample is of 1/6 s to 1 s
_PLACE_BYTES = 32  # a GPU's place on the bus, "00000000:41:00.0", with room


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class GpuUse:
    """Looks at a GPU from entering to leaving; `busy` is the median of what was seen.

    NVML reports the percentage of its last sample period in which a kernel was running: of all
    measures the one that needs nothing of the program that is measured. None where there is no
    NVML, or the time was too short for it. `index` is the GPU's number among those that this
    process sees; NVML counts all of the machine.
    """

    def __init__(self, index: int = 0) -> None:
        self.busy: float | None = None
        self._seen: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(_place_of(index),), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        settled = self._seen[len(self._seen) // 2 :]  # the first are of what was before
        if settled:
            self.busy = statistics.median(settled) / 100

    def _look(self, place: bytes | None) -> None:
        library = open_nvml()
        if library is None or place is None:
            return
        handle, used = ctypes.c_void_p(), _Utilization()
        if library.nvmlDeviceGetHandleByPciBusId_v2(place, ctypes.byref(handle)):
            return
        while not self._ended.wait(_SECONDS):
            if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used)) == 0:
                self._seen.append(used.gpu)


@cache
def _place_of(index: int) -> bytes | None:
    """Return a GPU's place on the bus, by which NVML finds it; None where there is no CUDA."""
    try:
        load_cuda_libraries()
        functions = load_functions()
    except TokenweirError:
        return None
    place = ctypes.create_string_buffer(_PLACE_BYTES)
    failed = functions["cudaDeviceGetPCIBusId"](place, _PLACE_BYTES, index)
    return None if failed else place.value
