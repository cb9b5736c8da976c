"""The CUDA runtime through ctypes: memory, copies and one stream, beside onnxruntime's own use.

The functions are those of the CUDA Runtime API: "Memory Management", "Stream Management" and "Event
Management".
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, NamedTuple

from engine.errors import DeviceError, OutOfDeviceMemory
from engine.wording import size_of

_LIBRARY = "libcudart.so.13"
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_NO_DEVICE = (35, 100)  # cudaErrorInsufficientDriver (or none at all), cudaErrorNoDevice
_NON_BLOCKING = 1  # cudaStreamNonBlocking
_WITHOUT_TIMES = 2  # cudaEventDisableTiming
_TO_DEVICE, _TO_HOST, _ON_DEVICE, _BY_ADDRESS = 1, 2, 3, 4  # cudaMemcpyKind
_PROPERTIES_BYTES = 8192  # cudaDeviceProp fits with room; its first 256 bytes are the name

Functions = Mapping[str, Callable[..., Any]]


class Region(NamedTuple):
    """A place in planes of rows of bytes, which lie one behind the other."""

    address: int  # the first plane's
    pitch: int  # bytes of a row
    rows_per_plane: int
    x: int = 0  # bytes before the place in its row
    y: int = 0  # rows before the place in its plane


class Extent(Structure):
    """How much of a region: bytes of each row, rows of each plane, planes."""

    _fields_ = [("width", c_size_t), ("height", c_size_t), ("depth", c_size_t)]


class _PitchedPointer(Structure):
    _fields_ = [("ptr", c_void_p), ("pitch", c_size_t), ("xsize", c_size_t), ("ysize", c_size_t)]


class _Position(Structure):
    _fields_ = [("x", c_size_t), ("y", c_size_t), ("z", c_size_t)]


class _Copy(Structure):
    _fields_ = [
        ("srcArray", c_void_p),
        ("srcPos", _Position),
        ("srcPtr", _PitchedPointer),
        ("dstArray", c_void_p),
        ("dstPos", _Position),
        ("dstPtr", _PitchedPointer),
        ("extent", Extent),
        ("kind", c_int),
    ]


_SIGNATURES: Mapping[str, list[Any]] = {
    "cudaDriverGetVersion": [POINTER(c_int)],
    "cudaEventCreateWithFlags": [POINTER(c_void_p), c_uint],
    "cudaEventDestroy": [c_void_p],
    "cudaEventRecord": [c_void_p, c_void_p],
    "cudaEventSynchronize": [c_void_p],
    "cudaFree": [c_void_p],
    "cudaFreeHost": [c_void_p],
    "cudaGetDeviceCount": [POINTER(c_int)],
    "cudaGetDeviceProperties": [c_void_p, c_int],
    "cudaGetLastError": [],
    "cudaHostAlloc": [POINTER(c_void_p), c_size_t, c_uint],
    "cudaMalloc": [POINTER(c_void_p), c_size_t],
    "cudaMemGetInfo": [POINTER(c_size_t), POINTER(c_size_t)],
    "cudaMemcpy3DAsync": [POINTER(_Copy), c_void_p],
    "cudaMemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, c_void_p],
    "cudaMemset3DAsync": [_PitchedPointer, c_int, Extent, c_void_p],
    "cudaMemsetAsync": [c_void_p, c_int, c_size_t, c_void_p],
    "cudaSetDevice": [c_int],
    "cudaStreamCreateWithFlags": [POINTER(c_void_p), c_uint],
    "cudaStreamSynchronize": [c_void_p],
}
_TEXTS = ("cudaGetErrorName", "cudaGetErrorString")


class CudaRuntime:
    """One device and one stream on it; what is queued there runs in order.

    Every method raises DeviceError if its call fails, or if one that was queued before it has
    failed since.
    """

    def __init__(self, device: int = 0, functions: Functions | None = None) -> None:
        """Open a device and make the stream; DeviceError if there is none or no library."""
        self._functions = load_functions() if functions is None else functions
        self._thread = threading.local()  # CUDA has a device for every thread
        self.device = device
        count = self._num_devices()
        if not 0 <= device < count:
            raise DeviceError(f"CUDA device {device} is not there; this machine has {count}")
        stream = c_void_p()
        self._call("cudaStreamCreateWithFlags", byref(stream), _NON_BLOCKING)
        self.stream = stream.value or 0  # its address

    def free_memory(self) -> tuple[int, int]:
        """Return the bytes of the device that are free, and all of them."""
        free, total = c_size_t(), c_size_t()
        self._call("cudaMemGetInfo", byref(free), byref(total))
        return free.value, total.value

    def device_name(self) -> str:
        """Return what the device is, as "NVIDIA H200"."""
        properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
        self._call("cudaGetDeviceProperties", properties, self.device)
        return properties.value.decode(errors="replace")

    def driver_version(self) -> str:
        """Return the newest CUDA version that the driver knows, as "13.0"."""
        version = c_int()
        self._call("cudaDriverGetVersion", byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new memory on the device; OutOfDeviceMemory if it is full."""
        pointer = c_void_p()
        try:
            self._call("cudaMalloc", byref(pointer), num_bytes)
        except OutOfDeviceMemory as error:
            free, total = self.free_memory()
            raise OutOfDeviceMemory(
                f"{error}; {size_of(num_bytes)} were wanted, {size_of(free)} of {size_of(total)} "
                "are free",
                lacking=num_bytes - free,
            ) from error
        return pointer.value or 0

    def free(self, address: int) -> None:
        """Give memory of the device back, when everything queued there is done."""
        self._call("cudaFree", address)

    def allocate_pinned(self, num_bytes: int) -> int:
        """Return the address of new memory of the host that the device reads and writes itself."""
        pointer = c_void_p()
        self._call("cudaHostAlloc", byref(pointer), num_bytes, 0)
        return pointer.value or 0

    def free_pinned(self, address: int) -> None:
        """Give pinned memory back."""
        self._call("cudaFreeHost", address)

    def upload(self, target: int, origin: int, num_bytes: int) -> None:
        """Queue a copy from the host to the device."""
        self._call("cudaMemcpyAsync", target, origin, num_bytes, _TO_DEVICE, self.stream)

    def download(self, target: int, origin: int, num_bytes: int) -> None:
        """Queue a copy from the device to the host."""
        self._call("cudaMemcpyAsync", target, origin, num_bytes, _TO_HOST, self.stream)

    def copy(self, target: int, origin: int, num_bytes: int) -> None:
        """Queue a copy on the device."""
        self._call("cudaMemcpyAsync", target, origin, num_bytes, _ON_DEVICE, self.stream)

    def fill(self, address: int, byte: int, num_bytes: int) -> None:
        """Queue writing one byte everywhere."""
        self._call("cudaMemsetAsync", address, byte, num_bytes, self.stream)

    def clear_region(self, region: Region, extent: Extent) -> None:
        """Queue zeros into a part of a device's memory."""
        first = region.address + region.y * region.pitch + region.x
        self._call("cudaMemset3DAsync", _pitched(region, first), 0, extent, self.stream)

    def copy_region(self, target: Region, origin: Region, extent: Extent) -> None:
        """Queue a copy between parts of a device's memory, or of pinned memory."""
        copy = _Copy(
            srcPos=_Position(origin.x, origin.y),
            srcPtr=_pitched(origin, origin.address),
            dstPos=_Position(target.x, target.y),
            dstPtr=_pitched(target, target.address),
            extent=extent,
            kind=_BY_ADDRESS,
        )
        self._call("cudaMemcpy3DAsync", byref(copy), self.stream)

    def synchronize(self) -> None:
        """Wait until everything that was queued is done."""
        self._call("cudaStreamSynchronize", self.stream)

    def create_event(self) -> int:
        """Return the address of a new event, which can be queued and waited for."""
        event = c_void_p()
        self._call("cudaEventCreateWithFlags", byref(event), _WITHOUT_TIMES)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        self._call("cudaEventDestroy", event)

    def queue_event(self, event: int) -> None:
        """Queue an event, which happens when everything that was queued before it is done."""
        self._call("cudaEventRecord", event, self.stream)

    def wait_for(self, event: int) -> None:
        """Wait until an event has happened that was queued; one that never was has happened."""
        self._call("cudaEventSynchronize", event)

    def _num_devices(self) -> int:
        count = c_int()
        code = self._functions["cudaGetDeviceCount"](byref(count))
        if code in _NO_DEVICE:
            raise DeviceError(
                f"this machine has no CUDA device: {self._described('cudaGetDeviceCount', code)}; "
                "CUDA 13 needs an NVIDIA GPU and a driver of version 580 or newer"
            )
        self._check("cudaGetDeviceCount", code)
        return count.value

    def _call(self, name: str, *arguments: object) -> None:
        if not hasattr(self._thread, "has_device"):
            self._check("cudaSetDevice", self._functions["cudaSetDevice"](self.device))
            self._thread.has_device = True
        self._check(name, self._functions[name](*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            # Else onnxruntime, which asks after every kernel, would take the error for its own.
            self._functions["cudaGetLastError"]()
            kind = OutOfDeviceMemory if code == _OUT_OF_MEMORY else DeviceError
            raise kind(self._described(name, code))

    def _described(self, name: str, code: int) -> str:
        error, text = (self._functions[get](code) or b"unknown" for get in _TEXTS)
        return f"{name} failed with {error.decode()} ({code}): {text.decode()}"


def load_functions() -> Functions:
    """Load the library, if it is not yet loaded; DeviceError if it is not installed."""
    waiting = _load()
    # Calls that only queue work keep the interpreter's lock: taking it again may take milliseconds.
    queueing = ctypes.PyDLL(_LIBRARY, handle=waiting._handle)
    functions: dict[str, Callable[..., Any]] = {}
    for name, arguments in _SIGNATURES.items():
        function = getattr(queueing if name.endswith(("Async", "Record")) else waiting, name)
        function.argtypes = arguments
        functions[name] = function
    for name in _TEXTS:
        functions[name] = getattr(waiting, name)
        functions[name].restype = c_char_p  # type: ignore[attr-defined]
    return functions


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DeviceError(
            f"the runtime of CUDA 13 cannot be loaded: {error}; "
            "pip install 'tokenweir[gpu]' brings it"
        ) from error


def _pitched(region: Region, address: int) -> _PitchedPointer:
    return _PitchedPointer(address, region.pitch, region.pitch, region.rows_per_plane)
