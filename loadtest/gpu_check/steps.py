"""Single calls of a model of real size: a decode step and a chunk of a prompt, memory, loading.

The graph is called as the engine calls it, without the engine: what remains of a step then is the
device's own. Eager and captured calls take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.cuda.device import CudaDevice, open_device
from engine.package.manifest import Precision
from engine.session import NOT_CAPTURED
from loadtest.gpu_check.contract_file import read_contract
from loadtest.gpu_check.device_decoder import DeviceDecoder
from loadtest.gpu_check.formats import weights_of
from loadtest.gpu_check.part import Found, Outcome, Settings
from loadtest.gpu_check.shapes import build
from loadtest.gpu_check.timing import Timed, time_in_turns

_ROWS, _QUICK_ROWS = (1, 32, 256), (1, 3)
_CHUNKS, _QUICK_CHUNKS = (128, 256, 512), (4, 8)
_CONTEXT = 512  # positions that a decoding row holds
_TURN_SECONDS = 1.0  # so long that NVML sees how busy the GPU is


def time_steps(
    settings: Settings, shape: str, precision: Precision | None = None, weights: str = ""
) -> Outcome:
    """Measure the calls of a shape's decoder on the device, in another format than its own."""
    path = build(
        shape,
        settings.work / "speed",
        quick=settings.quick,
        precision=precision,
        weights=weights_of(weights),
    )
    device = open_device()
    found, decoder = _load(path, device, max(_QUICK_ROWS if settings.quick else _ROWS))
    measure = _Measure(decoder, device, settings.quick)
    decoding = [measure.decode(rows, i) for i, rows in enumerate(measure.row_counts)]
    chunks = [measure.chunk(size, i) for i, size in enumerate(measure.chunk_sizes)]
    found["bytes_after_work"] = _used(device)
    tables = {
        f"decode steps with {measure.context} positions a row, us": decoding,
        "chunks of a prompt, us": chunks,
    }
    return Outcome(_summary(decoding, found), {**found, "tables": tables})


def _load(path: Path, device: CudaDevice, num_rows: int) -> tuple[Found, DeviceDecoder]:
    """Return a decoder with random rows, and the seconds and bytes of getting there."""
    before, started = _used(device), time.perf_counter()
    session = device.create_session(path / "decoder.onnx")
    seconds, loaded = time.perf_counter() - started, _used(device)
    decoder = DeviceDecoder(session, read_contract(path), device, num_rows)
    decoder.fill(np.random.default_rng(0))
    found: dict[str, Any] = {
        "load_seconds": seconds,
        "weight_file_bytes": (path / "decoder.onnx.data").stat().st_size,
        "bytes_of_session": loaded - before,
        "bytes_of_rows": _used(device) - loaded,
        "num_rows": num_rows,
    }
    return found, decoder


class _Measure:
    def __init__(self, decoder: DeviceDecoder, device: CudaDevice, quick: bool) -> None:
        self.row_counts = _QUICK_ROWS if quick else _ROWS
        self.chunk_sizes = _QUICK_CHUNKS if quick else _CHUNKS
        self.context = min(_CONTEXT, decoder.capacity // 2)
        self._decoder, self._wait = decoder, device.runtime.synchronize
        self._seconds = 0.0 if quick else _TURN_SECONDS

    def decode(self, num_rows: int, graph_id: int) -> dict[str, object]:
        """Time a decode call: queued one behind the other, and with its ids read each time."""
        decoder = self._decoder
        ids = np.arange(num_rows)[:, None] % decoder.contract.vocab_size
        positions = np.full((num_rows, 1), self.context)

        def queue(graph: int) -> None:
            decoder.run(0, ids, positions, graph_id=graph)

        def step(graph: int) -> None:
            queue(graph)
            decoder.read_ids(num_rows)

        capture = self._capture(lambda: queue(graph_id))
        seen = time_in_turns(
            {
                "eager": lambda: queue(NOT_CAPTURED),
                "captured": lambda: queue(graph_id),
                "eager, ids read": lambda: step(NOT_CAPTURED),
                "captured, ids read": lambda: step(graph_id),
            },
            self._wait,
            seconds=self._seconds,
        )
        read = seen["captured, ids read"].total
        return {"rows": num_rows, **_columns(seen), "capture ms": capture} | {
            "tokens/s": 1e6 * num_rows / read,
            "busy": seen["captured, ids read"].busy,
            "busy, queued": seen["captured"].busy,
            "busy, eager": seen["eager, ids read"].busy,
        }

    def chunk(self, size: int, number: int) -> dict[str, object]:
        """Time a chunk behind as many positions as there is room for, up to the context."""
        decoder = self._decoder
        ids = np.arange(size)[None] % decoder.contract.vocab_size
        start = min(self.context, decoder.capacity - size)
        positions = np.arange(start, start + size)[None]
        graph_id = len(self.row_counts) + number

        def queue(graph: int) -> None:
            decoder.run(0, ids, positions, graph_id=graph)

        capture = self._capture(lambda: queue(graph_id))
        works: Mapping[str, Callable[[], object]] = {
            "eager": lambda: queue(NOT_CAPTURED),
            "captured": lambda: queue(graph_id),
        }
        seen = time_in_turns(works, self._wait, seconds=self._seconds)
        return {
            "tokens": size,
            **_columns(seen),
            "capture ms": capture,
            "tokens/s": 1e6 * size / seen["eager"].total,
            "tokens/s captured": 1e6 * size / seen["captured"].total,
        }

    def _capture(self, work: Callable[[], object]) -> float:
        """Return the milliseconds of the first run with an id, which records it."""
        started = time.perf_counter()
        work()
        self._wait()
        return 1e3 * (time.perf_counter() - started)


def _columns(seen: dict[str, Timed]) -> dict[str, float]:
    columns = {name: timed.total for name, timed in seen.items()}
    return columns | {f"{name}, host": seen[name].host for name in ("eager", "captured")}


def _summary(decoding: list[dict[str, object]], found: Found) -> str:
    steps = ", ".join(f"{row['rows']}: {row['captured, ids read']:.0f}" for row in decoding)
    return (
        f"captured step in us by rows: {steps}; loaded in {found['load_seconds']:.1f} s; "
        f"weights and session {found['bytes_of_session'] / 1e9:.2f} GB, "
        f"{found['num_rows']} rows {found['bytes_of_rows'] / 1e9:.2f} GB"
    )


def _used(device: CudaDevice) -> int:
    free, total = device.runtime.free_memory()
    return total - free
