"""Runs steps of a runner on the emulated device.

Takes a contract and the paths of the graphs for draws as JSON, and a decoder, with its encoder if
it has one.

Prints as JSON what every step made the host do: what it launched, copied and bound, and how often
it waited.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from engine.cuda.device import open_device
from engine.cuda.memory import DeviceMemory
from engine.cuda.sampling_calls import sampling_calls_of
from engine.package.manifest import GenerationContract
from engine.requests.request import SamplingParams
from engine.sampling.logits import StepLogits
from engine.sampling.plain import SamplingGraph, SamplingInputs
from engine.sampling.truncation import Truncations
from engine.session import Binding
from engine.slots.batch import Encode, PrefillChunk, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from engine.slots.step_block import Pending

NUM_SLOTS = 8
NOTHING = ScheduledBatch()
COUNTERS = ("launches", "graphs", "syncs", "memcpys")
Brought = TypeVar("Brought")

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


def during(act: Callable[[], Brought]) -> tuple[dict[str, int], Brought]:
    for name in COUNTERS:
        getattr(library, f"emu_{name}")()  # begins anew
    counted.update(dict.fromkeys(counted, 0))
    brought = act()
    found = {name: getattr(library, f"emu_{name}")() for name in COUNTERS}
    return found | counted, brought


def steps(contract: GenerationContract) -> Iterator[tuple[str, ScheduledBatch]]:
    rows = range(3)
    cross = contract.cross_cache is not None
    if cross:
        encodes = tuple(Encode(row, (5,) * (4 + row // 2)) for row in rows)
        yield "encode", NOTHING._replace(encodes=encodes)
    chunks = tuple(PrefillChunk(row, (5, 6, 7), 1, row * cross) for row in rows)
    yield "chunks", NOTHING._replace(chunks=chunks)
    sources = tuple(rows) if cross else ()
    for k in (1, 20, 200):
        decode = NOTHING._replace(decode_ids=(5, 6, 7), decode_sources=sources, num_top=k)
        for i in range(3):
            yield f"decode {k} {i}", decode
    yield "mixed", decode._replace(chunks=(PrefillChunk(5, (5, 6, 7), 2, 1 * cross),), num_top=1)
    if cross:
        beams = decode._replace(decode_sources=(1, 1, 1), num_top=4)
        yield "beams", beams
        yield "beams again", beams
    if contract.alignment:
        yield "aligned", decode._replace(aligned=(0, 2), num_top=1)
    yield "large", NOTHING._replace(chunks=(PrefillChunk(6, (5,) * 30, 30, 0),))
    yield "decode after it", decode._replace(num_top=1)


def shapes(step: StepLogits) -> list[Any]:
    arrays = (step.logits, step.top_ids, step.top_logits, step.top_logprobs, step.alignment)
    return [None if array is None else list(array.shape) for array in arrays]


contract = GenerationContract.model_validate_json(sys.argv[1])
device = open_device()
draws = [device.create_session(Path(path)) for path in json.loads(sys.argv[2])]
runner = SlotModelRunner.load(
    contract,
    *[*sys.argv[3:], None][:2],
    sampling_calls_of(draws, contract.vocab_size),
    num_slots=NUM_SLOTS,
    device=device,
)
found: dict[str, Any] = {}
for name, batch in steps(contract):
    counts, step = during(lambda batch=batch: runner.run(batch))  # type: ignore[misc]
    found[name] = {**counts, "shapes": shapes(step)}
    if name == "decode 1 0":
        reading, _ = during(lambda step=step: step.fetch([0, 2]))  # type: ignore[misc]
        again, _ = during(lambda step=step: step.logits[2])  # type: ignore[misc]
        found["fetch"], found["fetch again"] = reading, again
        found["row"] = [str(step.logits[0].dtype), list(np.asarray(step.logits).shape)]


def run_ahead(
    batch: ScheduledBatch, draws: SamplingInputs | None = None
) -> tuple[dict[str, int], StepLogits]:
    before = runner.start(batch, draws)
    batch = batch._replace(future_tokens=(0, 1, 2))

    def ahead() -> tuple[Pending, StepLogits]:
        return runner.start(batch, draws), before()

    counts, (last, step) = during(ahead)
    last()
    return counts, step


how = Truncations.of([SamplingParams("sampling", top_k=20)] * 2, [20] * 2)
for k in (1, 20):
    decode = dict(steps(contract))[f"decode {k} 0"]
    found[f"ahead {k}"], _ = run_ahead(decode)
for kind in SamplingGraph:
    drawn = SamplingInputs(np.array([0, 2]), how, np.array([0.2, 0.7]), np.zeros(2, np.int64), kind)
    for number in range(2):
        found[f"drawn {kind} {number}"], step = during(partial(runner.run, decode, drawn))
    found[f"drawn {kind} ahead"], _ = run_ahead(decode, drawn)
    assert step.drawn is not None
    found[f"drawn {kind} rows"] = [list(array.shape) for array in step.drawn]

print(json.dumps(found))
