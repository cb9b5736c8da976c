"""The first look: what is here, whether two operators compute, and what no step can beat."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch

from engine.cuda.device import open_device
from engine.machine import machine_name
from engine.session import Session, create_session
from loadtest.lab.gpu.part import Found, Outcome, Settings

_DISTRIBUTIONS = r"onnx|onnxruntime|onnxscript|torch|transformers|numpy|tokenizers|pydantic|grpcio"
_LOOK = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
look (
  float16[32, 768] a, float16[768, 768] b,
  float16[1, 1, 512] q, float16[1, 1, 128] k, float16[1, 1, 128] v,
  float16[1, 2, 64, 64] past_k, float16[1, 2, 64, 64] past_v, int32[1] seqlens, int32[1] total
) => (
  float16[M, N] MatMul, float16[B, S, H] Attention,
  float16[B, K, T, D] k_after, float16[B, K, T, D] v_after
) {
  MatMul = MatMul (a, b)
  Attention, k_after, v_after = com.microsoft.GroupQueryAttention <num_heads = 8, kv_num_heads = 2>
    (q, k, v, past_k, past_v, seqlens, total)
}
"""  # a product of matrices, and one token's attention behind others, as in a decode step
_PAST, _ROOM = 5, 64  # positions: written, and there are
_FURTHEST = 2e-2  # share of the largest number
_COPIED, _MATRIX, _TIMES = 2**32, 8192, 10

Array = np.ndarray[Any, Any]


def look(settings: Settings) -> Outcome:
    """Return what is here; hold a product and an attention on the device against the CPU's."""
    names = {one.metadata["Name"]: one.version for one in distributions()}
    found: Found = {"python": sys.version, "machine": machine_name(), "versions": names}
    print({name: names.get(name) for name in _DISTRIBUTIONS.split("|")}, flush=True)
    device = open_device() if settings.device == "cuda" else None
    said: str = settings.device
    if device is not None:
        free, total = device.runtime.free_memory()
        said = f"{device.gpu_name}, driver {device.driver}, {free / 1e9:.0f} GB free"
        found |= {"gpu": device.gpu_name, "driver": device.driver, "bytes": [free, total]}
        print(said, flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as directory:
        path = Path(directory) / "look.onnx"
        ir.save(ir.from_onnx_text(_LOOK), path)
        on_cpu = create_session(path)
        feeds = _feeds(on_cpu)
        started = time.monotonic()
        session = on_cpu if device is None else device.create_session(path)
        outputs = session.run(feeds)
        found["seconds_to_first_answer"] = time.monotonic() - started
        expected = on_cpu.run(feeds)
    away = {name: _away(outputs[name], expected[name]) for name in ("MatMul", "Attention")}
    right = all(one < _FURTHEST for one in away.values())
    said += "".join(
        f"; {name} {'right' if one < _FURTHEST else 'WRONG'}, {one:.2g} away"
        for name, one in away.items()
    )
    if torch.cuda.is_available():
        found |= _ceilings()
        said += "; {bytes_per_second:.3g} bytes/s copied, {flops_per_second:.3g} FLOP/s in bf16"
        said = said.format(**found)
    elif device is not None:
        said += f"; torch {torch.__version__} sees no GPU: speed.* will fail"
    return Outcome(said, found | {"away": away}, right)


def _feeds(session: Session) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    drawn: dict[str, Array] = {
        name: rng.standard_normal(cast(tuple[int, ...], value.shape)).astype(value.dtype)
        for name, value in session.inputs.items()
    }
    lengths = {"seqlens": np.array([_PAST], np.int32), "total": np.array([_ROOM], np.int32)}
    return drawn | lengths


def _away(ours: Array, wanted: Array) -> float:
    away = np.abs(ours.astype(np.float64) - wanted).max() / np.abs(wanted).max()
    return float(np.nan_to_num(away, nan=np.inf))


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
