"""Loads graphs on the emulated device and prints what became of them, as JSON by path.

For each: `refused`, why the engine does not take it, or null: then every node runs on the device
and a call can be captured; and of a decoder `launches`, the kernels of a decode step of 8 rows.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from engine.device.device import CudaDevice, open_device
from engine.errors import TokenweirError
from engine.session import NOT_CAPTURED, create_session
from tests.emulated.bound_calls import bound, counts

SIZES = {"batch": 8, "tokens": 1, "num_logits": 8, "num_top": 1, "sources": 8, "beams": 1}


def look(path: str, device: CudaDevice) -> dict[str, Any]:
    try:
        session = create_session(path, device=device)
    except TokenweirError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {"refused": None}
    if path.endswith("decoder.onnx"):
        binding = bound(session, device, SIZES)
        counts(binding, NOT_CAPTURED)  # the first run prepares kernels
        found["launches"] = counts(binding, NOT_CAPTURED)["launches"]
    return found


if __name__ == "__main__":
    opened = open_device()
    print(json.dumps({path: look(path, opened) for path in sys.argv[1:]}))
