"""Binds memory of both sides to a decoder on the emulated device and runs it, eager and captured.

Prints as JSON what was refused, and what every run made the host do: kernels and graphs that it
launched, and how often it waited for the device.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.device import open_device
from engine.session import Binding, Session, create_session

SIZES = {"batch": 2, "tokens": 1, "num_logits": 2, "num_top": 1}
ON_HOST = {"num_top": np.int64, "total_seq": np.int32}

device = open_device()
session = create_session(sys.argv[1], device=device)
library = ctypes.CDLL(None)


def bound(session: Session) -> Binding:
    binding, memory = session.bind(), {}
    for name, value in session.inputs.items():
        shape = tuple(SIZES.get(str(size), size) for size in value.shape)
        if name in ON_HOST:
            binding.input(name, np.ones(1, ON_HOST[name]))
        else:
            memory[name] = device.memory.zeros(shape, value.dtype)  # type: ignore[arg-type]
            binding.input(name, memory[name])
    for name, value in session.outputs.items():
        shape = tuple(SIZES.get(str(size), size) for size in value.shape)
        past = memory.get(name.replace("present", "past_key_values"))
        binding.output(name, past or device.memory.zeros(shape, value.dtype))  # type: ignore[arg-type]
    return binding


def refusal(bind: Callable[..., None], name: str, array: Any) -> str:
    try:
        bind(name, array)
    except ValueError as error:
        return str(error)
    return "taken"


def counts(binding: Binding, graph_id: int) -> dict[str, int]:
    counters = {name: getattr(library, f"emu_{name}") for name in ("launches", "graphs", "syncs")}
    for counter in counters.values():
        counter()  # begins anew
    binding.run(graph_id)
    return {name: counter() for name, counter in counters.items()}


eager, captured = bound(session), bound(session)
there = device.memory.zeros((2, 1), "int64")
print(
    json.dumps(
        {
            "host array": refusal(session.bind().input, "input_ids", np.ones((2, 1), np.int64)),
            "host output": refusal(session.bind().output, "top_ids", np.ones((2, 1), np.int64)),
            "device array": refusal(session.bind().input, "num_top", there),
            "eager": [counts(eager, -1) for _ in range(3)],
            "captured": [counts(captured, 7) for _ in range(3)],
        }
    )
)
