"""The GPU of this process, and its work for an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cuda.cache_memory import DeviceCacheMemory
from engine.cuda.libraries import load_cuda_libraries
from engine.cuda.memory import DeviceArray, DeviceMemory
from engine.cuda.nvml import driver_version
from engine.cuda.room import fewer
from engine.cuda.runtime import CudaRuntime
from engine.cuda.step_block import DeviceStepBlock
from engine.package.graph_io import Bound
from engine.package.manifest import CacheShape, GenerationContract
from engine.slots.step_block import StepSize

if TYPE_CHECKING:
    from engine.session import Session


@dataclass(frozen=True)
class CudaDevice:
    """A GPU that is open; see Device."""

    index: int  # among those that this process sees
    runtime: CudaRuntime  # its stream is the one of this process
    memory: DeviceMemory
    gpu_name: str  # "NVIDIA H200"
    driver: str  # its version, "580.65.06"; where NVML does not say it, its CUDA version, "13.0"

    def create_session(self, path: Path) -> Session:
        """See Device."""
        from engine.cuda.session import create_session  # onnxruntime, behind the libraries

        return create_session(self.runtime, path)

    def cache_memory(self, num_rows: int, shape: CacheShape) -> DeviceCacheMemory:
        """See Device."""
        return DeviceCacheMemory(self.memory, num_rows, shape)

    def step_block(
        self,
        contract: GenerationContract,
        num_slots: int,
        *,
        num_tokens: int,
        size: StepSize | None = None,
    ) -> DeviceStepBlock:
        """See Device."""
        return DeviceStepBlock(self.memory, contract, num_slots, num_tokens=num_tokens, size=size)

    def feed(self, targets: Bound, ids: Bound, origins: Sequence[int]) -> None:
        """See Device."""
        assert isinstance(targets, DeviceArray) and isinstance(ids, DeviceArray)
        for first, origin, size in _neighbours(origins):
            part = targets[first : first + size]
            self.memory.copy_column(part, ids[origin : origin + size])

    def synchronize(self) -> None:
        """See Device."""
        self.runtime.synchronize()

    def fewer(self, num_slots: int, contract: GenerationContract, lacking: int) -> str:
        """See Device."""
        return fewer(num_slots, contract, lacking)


def open_device(index: int = 0) -> CudaDevice:
    """Open a GPU.

    Raises DeviceError if it or a library of CUDA is not there, ConfigError if the onnxruntime
    that is installed is not the one for CUDA.
    """
    load_cuda_libraries()
    runtime = CudaRuntime(index)
    memory = DeviceMemory(runtime)
    return CudaDevice(index, runtime, memory, runtime.device_name(), driver_of(runtime))


def driver_of(runtime: CudaRuntime) -> str:
    """Return the driver's version; without NVML, the newest CUDA version that it knows."""
    return driver_version() or runtime.driver_version()


def _neighbours(origins: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the rows that are copied, together where they and what they get lie beside each other.

    Each time that is the first of them, the first row that it gets its token from, and how many.
    """
    first = 0
    for stop in range(1, len(origins) + 1):
        if stop == len(origins) or origins[first] < 0 or origins[stop] != origins[stop - 1] + 1:
            if origins[first] >= 0:
                yield first, origins[first], stop - first
            first = stop
