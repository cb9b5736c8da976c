"""Loads graphs on the emulated device and prints what became of them, as JSON by path.

For each: `refused`, why the engine does not take it or a call of it fails, or null: then every node
is on the device; `taken`, the bytes there of its weights; `launches`, the kernels of a call: of a
decoder 8 rows of one token, of others 8 texts of several, for a sum of one number is none; and
`captured`, what a call does when it is captured, and what the same call does when it is made again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from engine.cuda.device import CudaDevice, open_device
from engine.errors import TokenweirError
from engine.package.graph_io import SEQLENS_K
from engine.session import NOT_CAPTURED
from tests.emulated.bound_calls import bound, counts

SIZES = {"rows": 8, "batch": 8, "num_logits": 8, "num_top": 1, "sources": 8, "beams": 8}
_GRAPH_ID = 7


def look(path: str, device: CudaDevice) -> dict[str, Any]:
    free, _ = device.runtime.free_memory()
    try:
        session = device.create_session(Path(path))
    except TokenweirError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    taken = free - device.runtime.free_memory()[0]
    binding = bound(session, device, {**SIZES, "tokens": 1 if SEQLENS_K in session.inputs else 5})
    try:  # some libraries are opened only when a kernel runs
        counts(binding, NOT_CAPTURED)  # the first run prepares kernels
    except Exception as error:  # onnxruntime has a dozen of its own, without a common base
        return {"refused": f"{type(error).__name__}: {error}"}
    launches = counts(binding, NOT_CAPTURED)["launches"]
    captured = [counts(binding, _GRAPH_ID) for _ in range(2)]
    return {"refused": None, "taken": taken, "launches": launches, "captured": captured}


if __name__ == "__main__":
    opened = open_device()
    print(json.dumps({path: look(path, opened) for path in sys.argv[1:]}))
