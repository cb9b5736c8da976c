"""The first look: what is here, whether two operators compute, and what no step can beat."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from engine.cuda.device import open_device
from engine.machine import machine_name
from engine.session import create_session
from loadtest.lab.gpu.part import Found, Outcome, Settings

_DISTRIBUTIONS = r"onnx|onnxruntime|onnxscript|torch|transformers|numpy|tokenizers|pydantic|grpcio"
_HEADS, _KEY_HEADS, _SIZE, _ROOM, _PAST = 8, 2, 64, 64, 5
_FURTHEST = 2e-2  # share of the largest number
_COPIED, _MATRIX, _TIMES = 2**32, 8192, 10

Array = np.ndarray[Any, Any]


def look(settings: Settings) -> Outcome:
    """Return what is here; check a product and an attention on the device."""
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
        ir.save(_graph(), path)
        started = time.monotonic()
        session = create_session(path) if device is None else device.create_session(path)
        feeds = _feeds()
        outputs = session.run(feeds)
        found["seconds_to_first_answer"] = time.monotonic() - started
    away = {name: _away(outputs[name], wanted) for name, wanted in _expected(feeds).items()}
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


def _graph() -> ir.Model:
    """A product of matrices, and one token's attention behind others, as in a decode step."""

    def value(name: str, array: Array) -> ir.Value:
        kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        return ir.Value(name=name, type=kind, shape=ir.Shape(array.shape))

    given = {name: value(name, array) for name, array in _feeds().items()}
    product = ir.node("MatMul", [given["a"], given["b"]])
    heads = {"num_heads": _HEADS, "kv_num_heads": _KEY_HEADS}
    inputs = [given[n] for n in ("q", "k", "v", "past_k", "past_v", "seqlens", "total")]
    attention = ir.node("GroupQueryAttention", inputs, heads, domain="com.microsoft", num_outputs=3)
    outputs = [*product.outputs, *attention.outputs]
    for name, one in zip(("MatMul", "Attention", "k_after", "v_after"), outputs, strict=True):
        one.name, one.type = name, ir.TensorType(ir.DataType.FLOAT16)
    opsets = {"": 21, "com.microsoft": 1}
    nodes = [product, attention]
    graph = ir.Graph(list(given.values()), outputs, nodes=nodes, opset_imports=opsets, name="look")
    return ir.Model(graph, ir_version=10)


def _feeds() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    cache = (1, _KEY_HEADS, _ROOM, _SIZE)
    shapes: dict[str, tuple[int, ...]] = {"a": (32, 768), "b": (768, 768)}
    shapes |= {"q": (1, 1, _HEADS * _SIZE), "k": (1, 1, _KEY_HEADS * _SIZE)}
    shapes |= {"v": (1, 1, _KEY_HEADS * _SIZE), "past_k": cache, "past_v": cache}
    drawn: dict[str, Array] = {
        name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()
    }
    lengths: dict[str, Array] = {
        "seqlens": np.array([_PAST], np.int32),
        "total": np.array([_ROOM], np.int32),
    }
    return drawn | lengths


def _expected(feeds: dict[str, Array]) -> dict[str, Array]:
    wide = {name: array.astype(np.float64) for name, array in feeds.items()}
    keys, values = (
        np.concatenate(
            [wide[f"past_{n}"][0, :, :_PAST], wide[n].reshape(_KEY_HEADS, 1, _SIZE)], axis=1
        ).repeat(_HEADS // _KEY_HEADS, axis=0)
        for n in ("k", "v")
    )  # (heads, positions, size)
    scores = np.einsum("hd,htd->ht", wide["q"].reshape(_HEADS, _SIZE), keys) / np.sqrt(_SIZE)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    attended = np.einsum("ht,htd->hd", weights, values).reshape(1, 1, -1)
    return {"MatMul": wide["a"] @ wide["b"], "Attention": attended}


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
