"""Single pieces of a step: likeliest tokens, the copy of a row, and what the GPU itself does."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch

from engine.cuda.device import CudaDevice, open_device
from engine.package.manifest import CacheShape
from engine.session import NOT_CAPTURED
from loadtest.gpu_check.part import Outcome, Settings
from loadtest.gpu_check.timing import time_in_turns

_DISTRIBUTIONS = ("onnxruntime-gpu", "onnxruntime", "torch", "transformers", "onnx", "numpy")
_TOPS, _TOP_ROWS, _VOCABULARY = (1, 64, 128), 256, 50_257
_GPT2_ROW = CacheShape(num_layers=12, num_kv_heads=12, max_len=1024, head_dim=64, dtype="fp16")
_QUICK_ROW = CacheShape(num_layers=2, num_kv_heads=2, max_len=64, head_dim=16, dtype="fp16")
_COPY_BYTES, _MATRIX = 2**32, 8192  # for measuring the GPU itself
_TURN_SECONDS = 0.2


def describe(settings: Settings) -> Outcome:
    """Say what is here, and what the GPU can do: bytes copied and numbers multiplied a second."""
    missing = missing_for_peers(settings.device)
    found: dict[str, Any] = {"versions": dict(_versions()), "missing_for_peers": missing}
    if settings.device == "cuda":
        device = open_device()
        free, total = device.runtime.free_memory()
        found |= {
            "gpu": device.gpu_name,
            "driver": device.driver,
            "free_bytes": free,
            "total_bytes": total,
        }
    if torch.cuda.is_available():
        found |= _ceilings()
    summary = f"{found.get('gpu', settings.device)}, driver {found.get('driver', 'none')}"
    if "flops_per_second" in found:
        rates = found["bytes_per_second"] / 1e12, found["flops_per_second"] / 1e12
        summary += ", {:.2f} TB/s copied, {:.0f} TFLOP/s in bf16".format(*rates)
    if missing:
        summary += f"; speed.* will fail: {', '.join(missing)}"
    return Outcome(summary, found)


def missing_for_peers(device: Literal["cuda", "cpu"]) -> list[str]:
    """Return what Hugging Face's models need to run on the device, and do not find."""
    missing = []
    if device == "cuda" and not torch.cuda.is_available():
        missing.append(f"torch {torch.__version__} sees no CUDA device")
    if importlib.util.find_spec("transformers") is None:
        missing.append("transformers is not installed")
    return missing


def time_top(settings: Settings) -> Outcome:
    """Measure the search for the k largest of 50,257 logits, in 256 rows."""
    device = open_device()
    rows = [
        {"k": k, "eager": seen["eager"].total, "captured": seen["captured"].total}
        for k, seen in ((k, _time_top(device, k, settings.quick)) for k in _TOPS)
    ]
    summary = ", ".join(f"k {row['k']}: {row['captured']:.0f} us" for row in rows)
    return Outcome(summary, {"tables": {f"{_TOP_ROWS} rows of {_VOCABULARY} logits, us": rows}})


def copy_rows(settings: Settings) -> Outcome:
    """Copy and exchange rows of a cache of GPT-2's shape; the numbers must arrive."""
    device = open_device()
    shape = _QUICK_ROW if settings.quick else _GPT2_ROW
    cache = device.cache_memory(2, shape)
    length = shape.max_len // 2
    size = (shape.num_layers, 2, shape.num_kv_heads, length, shape.head_dim)
    one, other = np.random.default_rng(0).standard_normal((2, *size)).astype(np.float16)
    cache.write(0, one)
    cache.copy(0, 1, 0, length)
    arrived = np.array_equal(cache.read(1, length), one)
    cache.write(1, other)
    cache.swap(0, 1, length, length)
    arrived &= np.array_equal(cache.read(0, length), other)
    arrived &= np.array_equal(cache.read(1, length), one)
    seen = time_in_turns(
        {
            "copy": partial(cache.copy, 0, 1, 0, length),
            "swap": partial(cache.swap, 0, 1, length, length),
        },
        device.runtime.synchronize,
        seconds=_turn_seconds(settings.quick),
    )
    rate = 2 * one.nbytes / (seen["copy"].total * 1e-6)
    found = {
        "row_bytes": one.nbytes,
        "copy_us": seen["copy"].total,
        "swap_us": seen["swap"].total,
        "bytes_per_second": rate,  # read and written
    }
    summary = (
        f"{one.nbytes / 1e6:.1f} MB copied in {seen['copy'].total:.0f} us, exchanged in "
        f"{seen['swap'].total:.0f} us"
    )
    return Outcome(summary if arrived else "rows did not arrive as they were", found, arrived)


def _turn_seconds(quick: bool) -> float:
    return 0.0 if quick else _TURN_SECONDS


def _versions() -> Any:
    for name in _DISTRIBUTIONS:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _ceilings() -> dict[str, float]:
    """Return what no step can beat; random numbers, as zeros are multiplied faster."""
    origin = torch.randn(_COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(origin)
    left, right = torch.randn(2, _MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16)
    copied = _median_of(lambda: target.copy_(origin))
    multiplied = _median_of(lambda: left @ right)
    return {
        "bytes_per_second": 2 * _COPY_BYTES / copied,
        "flops_per_second": 2 * _MATRIX**3 / multiplied,
    }


def _median_of(work: Any) -> float:
    seen = time_in_turns({"": work}, torch.cuda.synchronize, seconds=_TURN_SECONDS)
    return seen[""].total * 1e-6


def _time_top(device: CudaDevice, k: int, quick: bool) -> dict[str, Any]:
    num_rows = 4 if quick else _TOP_ROWS
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        path = Path(directory) / "top.onnx"
        _write_top(path, num_rows)
        session = device.create_session(path)
    logits = np.random.default_rng(0).standard_normal((num_rows, _VOCABULARY), np.float32)
    given = device.memory.zeros(logits.shape, "float32")
    device.memory.upload(given, logits)
    binding = session.bind()
    binding.input("logits", given)
    binding.input("k", np.array([k]))
    binding.output("values", device.memory.zeros((num_rows, k), "float32"))
    binding.output("ids", device.memory.zeros((num_rows, k), "int64"))
    works = {
        "eager": partial(binding.run, NOT_CAPTURED),
        "captured": partial(binding.run, 0),
    }
    return time_in_turns(works, device.runtime.synchronize, seconds=_turn_seconds(quick))


def _write_top(path: Path, num_rows: int) -> None:
    floats, ints = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.INT64)
    shape = ir.Shape([num_rows, _VOCABULARY])
    logits = ir.Value(name="logits", type=floats, shape=shape)
    k = ir.Value(name="k", type=ints, shape=ir.Shape([1]))
    node = ir.node("TopK", [logits, k], {"axis": -1}, num_outputs=2)
    values, ids = node.outputs
    for value, name, kind in ((values, "values", floats), (ids, "ids", ints)):
        value.name, value.type, value.shape = name, kind, ir.Shape([num_rows, "k"])
    graph = ir.Graph([logits, k], [values, ids], nodes=[node], opset_imports={"": 21}, name="top")
    ir.save(ir.Model(graph, ir_version=10), path)
