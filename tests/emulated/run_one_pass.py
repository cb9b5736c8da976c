"""Serves a one-pass package on the emulated device; prints as JSON what an engine answers there."""

from __future__ import annotations

import asyncio
import ctypes
import io
import json
import sys
from typing import Any

import numpy as np
from PIL import Image

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.one_pass.engine import EncoderEngine
from engine.one_pass.prediction import PredictionItem
from engine.package.package import Package, load_package

allocated = ctypes.CDLL(None).emu_malloc_bytes
allocated.restype = ctypes.c_long


def items_of(package: Package) -> list[PredictionItem]:
    image = package.manifest.image
    if image is None:
        return [PredictionItem("w3 w4 w5"), PredictionItem("w6 w7"), PredictionItem("w8 w9 w10")]
    file = io.BytesIO()
    Image.fromarray(np.zeros((image.size, image.size), np.uint8)).save(file, "PNG")
    return [PredictionItem(file.getvalue())] * 3


async def serve(path: str) -> dict[str, Any]:
    package = load_package(path)
    allocated()  # begins anew
    engine = load_engine(package, EngineConfig(max_num_seqs=4))
    assert isinstance(engine, EncoderEngine)
    taken = allocated()
    await engine.start()
    try:
        answer = await engine.predict(items_of(package), request_id="a", deadline=None)
    finally:
        await engine.stop()
    return {
        "logits": [item.logits.shape for item in answer.items],
        "embedding": [item.embedding.shape for item in answer.items],
        "taken": taken,
    }


print(json.dumps({path: asyncio.run(serve(path)) for path in sys.argv[1:]}))
