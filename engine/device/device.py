"""The GPU of this process: what it is, its memory, its stream."""

from __future__ import annotations

from dataclasses import dataclass

from engine.device.cuda_runtime import CudaRuntime
from engine.device.libraries import load_cuda_libraries
from engine.device.memory import DeviceMemory
from engine.device.nvml import driver_version


@dataclass(frozen=True)
class CudaDevice:
    """A GPU that is open."""

    index: int  # among those that this process sees
    runtime: CudaRuntime  # its stream is the one of this process
    memory: DeviceMemory
    gpu_name: str  # "NVIDIA H200"
    driver: str  # its version, "580.65.06"; where NVML does not say it, its CUDA version, "13.0"


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
