"""Binds memory of both sides to a decoder on the emulated device and runs it, eager and captured.

Prints as JSON what was refused, what onnxruntime was told, and what every run made the host do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine.cuda.device import open_device
from engine.session import NOT_CAPTURED
from tests.emulated.bound_calls import bound, counts

SIZES = {"batch": 2, "tokens": 1, "num_logits": 2, "num_top": 1}

device = open_device()
session = device.create_session(Path(sys.argv[1]))


def refusal(bind: Callable[..., None], name: str, array: Any) -> str:
    try:
        bind(name, array)
    except ValueError as error:
        return str(error)
    return "taken"


eager, captured = (bound(session, device, SIZES) for _ in range(2))
there = device.memory.zeros((2, 1), "int64")
told = session._session.get_provider_options()["CUDAExecutionProvider"]
print(
    json.dumps(
        {
            "host array": refusal(session.bind().input, "input_ids", np.ones((2, 1), np.int64)),
            "host output": refusal(session.bind().output, "top_ids", np.ones((2, 1), np.int64)),
            "device array": refusal(session.bind().input, "num_top", there),
            "eager": [counts(eager, NOT_CAPTURED) for _ in range(3)],
            "captured": [counts(captured, 7) for _ in range(3)],
            "stream": str(device.runtime.stream),
            "told": told,
            "is deterministic": session._session.get_session_options().use_deterministic_compute,
        }
    )
)
