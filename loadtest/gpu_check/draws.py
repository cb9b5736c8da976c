"""The graphs that draw the next tokens of a step: how long they take, and whether they are right.

They are called as the engine calls them, behind logits that stay.
"""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from engine.cuda.device import CudaDevice, open_device
from engine.cuda.memory import DeviceArray
from engine.cuda.sampling_calls import SamplingCalls
from engine.cuda.step_block import DeviceStepBlock
from engine.errors import CertificateError
from engine.package.graph_io import SAMPLING_GRAPHS
from engine.package.manifest import CacheShape, GenerationContract
from engine.sampling.plain import SamplingGraph
from engine.sampling.top_k import step_logits
from engine.session import Session
from engine.slots.calls.graph_call import GraphCall
from engine.slots.step_block import StepSize
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.sampling_graphs import sampling_graphs
from exporter.prover.draws import AskedDraws, ask_draws, check_draws
from loadtest.gpu_check.part import Outcome, Settings
from loadtest.gpu_check.timing import time_in_turns

_VOCABULARY, _QUICK_VOCABULARY = 50_257, 700
_ROWS, _QUICK_ROWS = (32, 256), (2, 4)
_NUM_TOP = 128  # likeliest tokens that calls have where a draw wants a share of all
_TURN_SECONDS = 0.2


def time_draws(settings: Settings) -> Outcome:
    """Measure each graph, which draws for all rows of a step, and compare it with the sampler."""
    vocab_size = _QUICK_VOCABULARY if settings.quick else _VOCABULARY
    row_counts = _QUICK_ROWS if settings.quick else _ROWS
    calls = _Calls(open_device(), vocab_size, row_counts[-1])
    wrong: list[str] = []
    rows: list[dict[str, Any]] = []
    for num_rows in row_counts:
        for kind in SamplingGraph:
            asked = calls.plan(kind, num_rows)
            rows.append({"graph": SAMPLING_GRAPHS[kind], "rows": num_rows})
            rows[-1] |= calls.time(0.0 if settings.quick else _TURN_SECONDS)
            wrong += calls.problems(asked)
    of_most = [f"{row['graph']} {row['captured']:.0f} us" for row in rows[-len(SamplingGraph) :]]
    summary = f"{row_counts[-1]} rows: {', '.join(of_most)}"
    tables = {f"draws from {vocab_size} tokens, us": rows}
    return Outcome("; ".join([summary, *wrong[:1]]), {"tables": tables, "wrong": wrong}, not wrong)


class _Calls:
    """The calls of one graph on the same rows, eager and captured."""

    def __init__(self, device: CudaDevice, vocab_size: int, num_slots: int) -> None:
        self._device, self._vocab_size = device, vocab_size
        self._rng = np.random.default_rng(0)
        contract = _contract(vocab_size)
        self._block = DeviceStepBlock(device.memory, contract, num_slots, num_tokens=1)
        graphs = _sessions(vocab_size, device)
        self._draws = {
            "eager": SamplingCalls(graphs, self._block, num_slots, None),
            "captured": SamplingCalls(graphs, self._block, num_slots, count()),
        }
        logits = 3 * self._rng.standard_normal((num_slots, vocab_size), np.float32)
        for target, array in zip(
            self._block.decode_outputs(num_slots, _NUM_TOP),
            step_logits(logits, _NUM_TOP)[:4],  # for all tokens, and for the likeliest
            strict=True,
        ):
            assert isinstance(target, DeviceArray) and isinstance(array, np.ndarray)
            device.memory.upload(target, array)
            device.runtime.synchronize()
        self._planned: dict[str, GraphCall] = {}

    def plan(self, kind: SamplingGraph, num_rows: int) -> AskedDraws:
        """Ask for draws of the first rows."""
        asked = ask_draws(self._rng, num_rows, _NUM_TOP, self._vocab_size, kind)
        self._block.begin(StepSize(num_rows, num_rows, _NUM_TOP, 0, is_drawn=True))
        self._planned = {
            name: draws.plan(asked.draws, num_rows, _NUM_TOP) for name, draws in self._draws.items()
        }
        self._block.upload()
        return asked

    def time(self, seconds: float) -> dict[str, float]:
        """Return how long each call takes, in microseconds."""
        works = {name: call.run for name, call in self._planned.items()}
        seen = time_in_turns(works, self._device.runtime.synchronize, seconds=seconds)
        return {name: timed.total for name, timed in seen.items()}

    def problems(self, asked: AskedDraws) -> list[str]:
        """Return which calls draw something else than the sampler."""
        found = []
        for name, call in self._planned.items():
            call.run()
            try:
                check_draws(self._block.send()(), asked)
            except CertificateError as error:
                found.append(f"{name}: {error}")
        return found


def _contract(vocab_size: int) -> GenerationContract:
    return GenerationContract(
        vocab_size=vocab_size,
        num_heads=1,
        cache=CacheShape(num_layers=1, num_kv_heads=1, max_len=1, head_dim=8),
        cross_cache=None,
        decoder_start_token_id=None,
        eos_token_ids=(0,),
    )


def _sessions(vocab_size: int, device: CudaDevice) -> list[Session]:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        write_graphs(sampling_graphs(vocab_size), Path(directory))
        return [device.create_session(Path(directory) / name) for name in SAMPLING_GRAPHS]
