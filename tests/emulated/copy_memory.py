"""Copies arrays to the emulated device and back, and prints as JSON what came of it."""

from __future__ import annotations

import json

import numpy as np

from engine.cuda.device import open_device
from engine.errors import OutOfDeviceMemory

device = open_device()
runtime, memory = device.runtime, device.memory
sent = np.arange(24, dtype=np.int32).reshape(4, 6)
received = np.zeros_like(sent)
array = memory.zeros(sent.shape, "int32")
memory.download(received, array)
runtime.synchronize()
cleared = not received.any()
memory.upload(array, sent)
memory.download(received, array)
runtime.synchronize()
block = memory.pinned(sent.nbytes)
memory.download(block, array.view(0, "int8", (sent.nbytes,)))
runtime.synchronize()
too_much = ""
try:
    memory.zeros((2**55,), "int64")
except OutOfDeviceMemory as error:
    too_much = str(error)
print(
    json.dumps(
        {
            "name": device.gpu_name,
            "driver": device.driver,
            "stream": runtime.stream,
            "cleared": cleared,
            "there_and_back": bool((sent == received).all()),
            "pinned": bool((block.view(np.int32).reshape(sent.shape) == sent).all()),
            "too_much": too_much,
        }
    )
)
