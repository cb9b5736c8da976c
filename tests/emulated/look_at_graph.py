"""Loads graphs on the emulated device and prints what became of them, as JSON by path.

For each: `on_cpu`, the nodes that do not run on the device; `captures`, whether onnxruntime takes
the graph for capture; and of a decoder `launches`, the kernels of a decode step of 8 rows.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np
import onnxruntime as ort

OPTIONS = {"use_tf32": "0", "sdpa_kernel": "1"}
OPEN_SIZES = {"batch": 8, "tokens": 1, "num_logits": 8, "sources": 8, "beams": 1}
TYPES = {"int64": np.int64, "int32": np.int32, "int8": np.int8, "float": np.float32}
TYPES |= {"float16": np.float16, "bfloat16": np.uint16}
ELEMENTS = {"int64": 7, "int32": 6, "int8": 3, "float": 1, "float16": 10, "bfloat16": 16}
ON_HOST = ("num_top", "total_seq")  # inputs that kernels read on the host


def look(path: str) -> dict[str, Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(path, options, [("CUDAExecutionProvider", OPTIONS)])
    assigned = session.get_provider_graph_assignment_info()
    found: dict[str, Any] = {
        "on_cpu": [
            f"{node.op_type} {node.name}"
            for part in assigned
            if "CUDA" not in part.ep_name
            for node in part.get_nodes()
        ],
        "captures": _captures(path),
    }
    if path.endswith("decoder.onnx"):
        found["launches"] = _launches(session)
    return found


def _captures(path: str) -> bool:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    provider = ("CUDAExecutionProvider", {**OPTIONS, "enable_cuda_graph": "1"})
    try:
        ort.InferenceSession(path, options, [provider])
    except Exception:  # onnxruntime's own have no other class in common
        return False
    return True


def _launches(session: ort.InferenceSession) -> int:
    binding, keep = session.io_binding(), {}
    for value in session.get_inputs():
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        shape = [OPEN_SIZES.get(size, 0) if isinstance(size, str) else size for size in value.shape]
        array = keep[value.name] = np.ones(shape, TYPES[kind])
        if value.name in ON_HOST:
            binding.bind_cpu_input(value.name, array)
        else:  # device memory is the host's
            binding.bind_input(
                value.name, "cuda", 0, ELEMENTS[kind], list(array.shape), array.ctypes.data
            )
    for value in session.get_outputs():
        past = keep.get(value.name.replace("present", "past_key_values"))
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        if past is None:
            binding.bind_output(value.name, "cuda")
        else:
            binding.bind_output(
                value.name, "cuda", 0, ELEMENTS[kind], list(past.shape), past.ctypes.data
            )
    counter = ctypes.CDLL(None).emu_launches
    counter.restype = ctypes.c_long
    session.run_with_iobinding(binding)  # the first run prepares kernels
    counter()
    session.run_with_iobinding(binding)
    return int(counter())


if __name__ == "__main__":
    print(json.dumps({path: look(path) for path in sys.argv[1:]}))
