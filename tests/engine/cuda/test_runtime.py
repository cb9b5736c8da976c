"""Calls of the CUDA runtime: what goes wrong is said, and to whom it belongs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest

from engine.cuda.runtime import CudaRuntime, Extent, Region, load_functions
from engine.errors import DeviceError, OutOfDeviceMemory
from tests.engine.cuda.fake_cuda import NAME, FakeCuda


def test_a_missing_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)

    with pytest.raises(DeviceError, match=r"libcudart\.so\.13: cannot.*'tokenweir\[gpu\]'"):
        load_functions()


@pytest.mark.parametrize(("code", "name"), [(35, "InsufficientDriver"), (100, "NoDevice")])
def test_a_machine_without_a_device_says_so(code: int, name: str) -> None:
    fake = FakeCuda()
    fake.codes["cudaGetDeviceCount"] = code

    with pytest.raises(DeviceError, match=rf"no CUDA device.*cudaError{name} \({code}\).*580"):
        fake.runtime()


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match="CUDA device 1 is not there; this machine has 1"):
        CudaRuntime(1, FakeCuda().functions)


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("cudaStreamSynchronize", lambda runtime: runtime.synchronize()),
        ("cudaMemcpyAsync", lambda runtime: runtime.download(0, 0, 1)),
        (
            "cudaMemcpy3DAsync",
            lambda runtime: runtime.copy_region(Region(0, 1, 1), Region(0, 1, 1), Extent()),
        ),
    ],
)
def test_an_error_has_its_name_and_code(
    function: str, call: Callable[[CudaRuntime], object]
) -> None:
    fake = FakeCuda()
    runtime = fake.runtime()
    fake.codes[function] = 700

    with pytest.raises(DeviceError, match=rf"{function} failed with cudaErrorIllegal.* \(700\)"):
        call(runtime)


def test_a_full_device_says_what_was_wanted_and_what_is_there() -> None:
    runtime = FakeCuda(2_000_000).runtime()
    runtime.allocate(500_000)

    with pytest.raises(OutOfDeviceMemory, match=r"MemoryAllocation \(2\).*3\.0 MB.*1\.5 MB of 2"):
        runtime.allocate(3_000_000)


def test_an_error_is_not_left_for_the_next_who_asks() -> None:
    fake = FakeCuda(100)
    runtime = fake.runtime()

    with pytest.raises(OutOfDeviceMemory):
        runtime.allocate(101)

    assert fake.calls[fake.calls.index("cudaMalloc") + 1] == "cudaGetLastError"


def test_every_thread_has_the_device() -> None:
    fake = FakeCuda()
    runtime = fake.runtime()
    fake.calls.clear()

    thread = threading.Thread(target=lambda: (runtime.allocate(1), runtime.allocate(1)))
    thread.start()
    thread.join()

    assert fake.calls == ["cudaSetDevice", "cudaMalloc", "cudaMalloc"]


def test_the_device_is_described() -> None:
    runtime = FakeCuda(1000).runtime()

    assert (runtime.device_name(), runtime.driver_version()) == (NAME, "13.1")
    assert runtime.free_memory() == (1000, 1000)
