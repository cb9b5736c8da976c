"""The GPU of this process: what it is, its memory, its stream."""

from __future__ import annotations

from dataclasses import dataclass

from engine.device.cuda_runtime import CudaRuntime
from engine.device.libraries import load_cuda_libraries
from engine.device.memory import DeviceMemory


@dataclass(frozen=True)
class CudaDevice:
    """A GPU that is open."""

    index: int  # among those that this process sees
    runtime: CudaRuntime  # its stream is the one of this process
    memory: DeviceMemory
    gpu_name: str  # "NVIDIA H200"
    driver: str  # the newest CUDA version that it knows: "13.0"


def open_device(index: int = 0) -> CudaDevice:
    """Open a GPU.

    Raises DeviceError if it or a library of CUDA is not there, ConfigError if the onnxruntime
    that is installed is not the one for CUDA.
    """
    load_cuda_libraries()
    runtime = CudaRuntime(index)
    memory = DeviceMemory(runtime)
    return CudaDevice(index, runtime, memory, runtime.device_name(), runtime.driver_version())
