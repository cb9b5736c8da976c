"""Runs steps of a runner on the emulated device; takes a contract as JSON, and a graph or two.

Prints as JSON what every step made the host do: what it launched, copied and bound, and how often
it waited.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from engine.device.device import open_device
from engine.device.memory import DeviceMemory
from engine.package.manifest import GenerationContract
from engine.sampling.logits import StepLogits
from engine.session import Binding
from engine.slots.batch import Encode, PrefillChunk, ScheduledBatch
from engine.slots.runner import SlotModelRunner

NUM_SLOTS = 8
NOTHING = ScheduledBatch()
COUNTERS = ("launches", "graphs", "syncs", "memcpys")

counted = dict.fromkeys(("bound", "uploads", "downloads"), 0)
library = ctypes.CDLL(None)


def count_calls(cls: type, method: str, name: str) -> None:
    original = getattr(cls, method)

    def counting(self: object, *arguments: object) -> None:
        counted[name] += 1
        original(self, *arguments)

    setattr(cls, method, counting)


for cls, method, name in (
    (Binding, "input", "bound"),
    (Binding, "output", "bound"),
    (DeviceMemory, "upload", "uploads"),
    (DeviceMemory, "download", "downloads"),
):
    count_calls(cls, method, name)


def during(act: Callable[[], StepLogits]) -> tuple[dict[str, int], StepLogits]:
    for name in COUNTERS:
        getattr(library, f"emu_{name}")()  # begins anew
    counted.update(dict.fromkeys(counted, 0))
    step = act()
    found = {name: getattr(library, f"emu_{name}")() for name in COUNTERS}
    return found | counted, step


def steps(contract: GenerationContract) -> Iterator[tuple[str, ScheduledBatch]]:
    rows = range(3)
    cross = contract.cross_cache is not None
    if cross:
        encodes = tuple(Encode(row, (5,) * (4 + row // 2)) for row in rows)
        yield "encode", replace(NOTHING, encodes=encodes)
    chunks = tuple(PrefillChunk(row, (5, 6, 7), 1, row * cross) for row in rows)
    yield "chunks", replace(NOTHING, chunks=chunks)
    sources = tuple(rows) if cross else ()
    for k in (1, 20, 200):
        decode = replace(NOTHING, decode_ids=(5, 6, 7), decode_sources=sources, num_top=k)
        for i in range(3):
            yield f"decode {k} {i}", decode
    yield "mixed", replace(decode, chunks=(PrefillChunk(5, (5, 6, 7), 2, 1 * cross),), num_top=1)
    if cross:
        beams = replace(decode, decode_sources=(1, 1, 1), num_top=4)
        yield "beams", beams
        yield "beams again", beams
    if contract.alignment:
        yield "aligned", replace(decode, aligned=(0, 2), num_top=1)
    yield "large", replace(NOTHING, chunks=(PrefillChunk(6, (5,) * 30, 30, 0),))
    yield "decode after it", replace(decode, num_top=1)


def shapes(step: StepLogits) -> list[Any]:
    arrays = (step.logits, step.top_ids, step.top_logits, step.top_logprobs, step.alignment)
    return [None if array is None else list(array.shape) for array in arrays]


contract = GenerationContract.model_validate_json(sys.argv[1])
runner = SlotModelRunner.load(
    contract, *[*sys.argv[2:], None][:2], num_slots=NUM_SLOTS, device=open_device()
)
found: dict[str, Any] = {}
for name, batch in steps(contract):
    counts, step = during(lambda batch=batch: runner.run(batch))  # type: ignore[misc]
    found[name] = {**counts, "shapes": shapes(step)}
    if name == "decode 1 0":
        reading, _ = during(lambda step=step: step.fetch([0, 2]))  # type: ignore[misc, return-value]
        again, _ = during(lambda step=step: step.logits[2])  # type: ignore[misc, return-value]
        found["fetch"], found["fetch again"] = reading, again
        found["row"] = [str(step.logits[0].dtype), list(np.asarray(step.logits).shape)]

print(json.dumps(found))
