"""A CUDA runtime in Python: device memory is memory of the host, a stream a list of calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from engine.cuda.device import CudaDevice
from engine.cuda.memory import ALIGNMENT, DeviceArray, DeviceMemory, aligned
from engine.cuda.runtime import CudaRuntime

NAME = "NVIDIA Fake 9000"
OUT_OF_MEMORY = 2
_ERRORS = {
    OUT_OF_MEMORY: (b"cudaErrorMemoryAllocation", b"out of memory"),
    35: (b"cudaErrorInsufficientDriver", b"CUDA driver version is insufficient"),
    100: (b"cudaErrorNoDevice", b"no CUDA-capable device is detected"),
    700: (b"cudaErrorIllegalAddress", b"an illegal memory access was encountered"),
}
_NOWHERE = SimpleNamespace(x=0, y=0)
_DIRT = 0xA5  # new memory is full of it


class FakeCuda:
    """Does what is queued when somebody waits, and refuses what lies outside of its memory."""

    def __init__(self, num_bytes: int = 2**30) -> None:
        self.num_bytes = num_bytes
        self.calls: list[str] = []
        self.codes: dict[str, int] = {}  # returned by calls of these names
        self.memory: dict[int, Any] = {}  # on the device, by address
        self.pinned: dict[int, Any] = {}
        self._queued: list[Callable[[], object]] = []
        self._events: dict[int, int] = {}  # by address: how many works were queued before it
        self._num_queued = self._num_done = 0
        self.functions = {
            name.removeprefix("_fake_"): self._recorded(name.removeprefix("_fake_"))
            for name in dir(self)
            if name.startswith("_fake_")
        }
        self.functions["cudaGetErrorName"] = lambda code: _ERRORS[code][0]
        self.functions["cudaGetErrorString"] = lambda code: _ERRORS[code][1]

    def runtime(self) -> CudaRuntime:
        return CudaRuntime(functions=self.functions)

    def device(self) -> CudaDevice:
        runtime = self.runtime()
        memory = DeviceMemory(runtime)
        return CudaDevice(0, runtime, memory, runtime.device_name(), runtime.driver_version())

    @property
    def num_used(self) -> int:
        return sum(map(len, self.memory.values()))

    def content(self, array: DeviceArray) -> bytes:
        self._run()
        self._check(array.address, array.num_bytes)
        return ctypes.string_at(array.address, array.num_bytes)

    def _recorded(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.codes:
                return self.codes[name]
            return getattr(self, f"_fake_{name}")(*arguments) or 0

        return call

    def queue(self, work: Callable[[], object]) -> None:
        self._queued.append(work)
        self._num_queued += 1

    def _run(self, until: int | None = None) -> None:
        """Do what is queued, as late as may be: up to the work of a number, or all of it."""
        until = self._num_queued if until is None else until
        while self._num_done < until:
            self._num_done += 1
            self._queued.pop(0)()

    def _check(self, address: int, num_bytes: int) -> None:
        for start, buffer in (*self.memory.items(), *self.pinned.items()):
            if start <= address and address + num_bytes <= start + len(buffer):
                return
        raise AssertionError(f"{num_bytes} bytes at {address} are not memory of the device")

    def _allocate(self, found: Any, num_bytes: int, memory: dict[int, Any]) -> None:
        block = (ctypes.c_uint8 * (num_bytes + ALIGNMENT))()
        address = aligned(ctypes.addressof(block))
        offset = address - ctypes.addressof(block)
        buffer = (ctypes.c_uint8 * num_bytes).from_buffer(block, offset)
        ctypes.memset(address, _DIRT, num_bytes)
        memory[address] = buffer
        found._obj.value = address

    def _fake_cudaGetDeviceCount(self, count: Any) -> None:
        count._obj.value = 1

    def _fake_cudaSetDevice(self, device: int) -> None: ...

    def _fake_cudaGetLastError(self) -> None: ...

    def _fake_cudaGetDeviceProperties(self, properties: Any, device: int) -> None:
        properties.value = NAME.encode()

    def _fake_cudaDriverGetVersion(self, version: Any) -> None:
        version._obj.value = 13010

    def _fake_cudaMemGetInfo(self, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = self.num_bytes - self.num_used, self.num_bytes

    def _fake_cudaMalloc(self, found: Any, num_bytes: int) -> int:
        if self.num_used + num_bytes > self.num_bytes:
            return OUT_OF_MEMORY
        self._allocate(found, num_bytes, self.memory)
        return 0

    def _fake_cudaFree(self, address: int) -> None:
        self._run()
        del self.memory[address]

    def _fake_cudaHostAlloc(self, found: Any, num_bytes: int, flags: int) -> None:
        self._allocate(found, num_bytes, self.pinned)

    def _fake_cudaFreeHost(self, address: int) -> None:
        self._run()
        del self.pinned[address]

    def _fake_cudaStreamCreateWithFlags(self, stream: Any, flags: int) -> None:
        stream._obj.value = 1234

    def _fake_cudaStreamSynchronize(self, stream: int) -> None:
        self._run()

    def _fake_cudaEventCreateWithFlags(self, event: Any, flags: int) -> None:
        event._obj.value = 8 * (len(self._events) + 1)
        self._events[event._obj.value] = 0

    def _fake_cudaEventDestroy(self, event: int) -> None: ...

    def _fake_cudaEventRecord(self, event: int, stream: int) -> None:
        self._events[event] = self._num_queued

    def _fake_cudaEventSynchronize(self, event: int) -> None:
        self._run(self._events[event])

    def _fake_cudaMemsetAsync(self, address: int, byte: int, num_bytes: int, stream: int) -> None:
        self._check(address, num_bytes)
        self.queue(lambda: ctypes.memset(address, byte, num_bytes))

    def _fake_cudaMemcpyAsync(
        self, target: int, origin: int, num_bytes: int, kind: int, stream: int
    ) -> None:
        for address in {1: [target], 2: [origin], 3: [target, origin]}[kind]:
            self._check(address, num_bytes)
        self.queue(lambda: ctypes.memmove(target, origin, num_bytes))

    def _fake_cudaMemset3DAsync(self, where: Any, byte: int, extent: Any, stream: int) -> None:
        for address in self._rows(where, _NOWHERE, extent):
            self.queue(lambda at=address: ctypes.memset(at, byte, extent.width))

    def _fake_cudaMemcpy3DAsync(self, given: Any, stream: int) -> None:
        copy = given._obj
        targets = self._rows(copy.dstPtr, copy.dstPos, copy.extent)
        origins = self._rows(copy.srcPtr, copy.srcPos, copy.extent)
        width = copy.extent.width
        for target, origin in zip(targets, origins, strict=True):
            self.queue(lambda to=target, at=origin: ctypes.memmove(to, at, width))

    def _rows(self, where: Any, first: Any, extent: Any) -> list[int]:
        assert first.x + extent.width <= where.xsize and first.y + extent.height <= where.ysize
        rows = [
            where.ptr + (plane * where.ysize + row + first.y) * where.pitch + first.x
            for plane in range(extent.depth)
            for row in range(extent.height)
        ]
        for address in rows:
            self._check(address, extent.width)
        return rows
