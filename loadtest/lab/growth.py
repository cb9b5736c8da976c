"""The study of cost: time of a decode step against batch and context, beside what it must cost.

`python -m loadtest.lab growth packages/gpt2 --out loadtest/results/growth-gpt2`
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from matplotlib.figure import Figure

from engine.machine import machine_name, num_cores
from engine.package.manifest import GenerationContract
from engine.package.package import load_package
from engine.slots.batch import ScheduledBatch
from engine.slots.runner import SlotModelRunner
from loadtest.benchmark.work import generation_contract
from loadtest.errors import LoadTestError
from loadtest.lab.machine import Machine, measure_machine
from loadtest.lab.result import write_result
from loadtest.reports.plots import write_figure

_BYTES_PER_NUMBER = 4


@dataclass(frozen=True)
class Step:
    """A decode step of `batch` sequences that have `context` tokens each."""

    batch: int
    context: int
    seconds: tuple[float, ...]  # by round
    floor: float  # seconds that reading and multiplying alone take on this machine

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Model:
    """The weights that a step has to read and multiply."""

    weight_bytes: int  # read once a step
    num_weights: int  # each multiplied and added once a sequence

    def floor(
        self, machine: Machine, contract: GenerationContract, batch: int, context: int
    ) -> float:
        """Return the least seconds of a step."""
        cache = contract.cache
        numbers = 2 * cache.num_layers * cache.num_kv_heads * cache.head_dim * context * batch
        num_bytes = self.weight_bytes + numbers * _BYTES_PER_NUMBER
        # At least one query head for each key head: more heads only add arithmetic.
        return machine.floor(num_bytes, 2.0 * self.num_weights * batch + 2.0 * numbers)


def measure_steps(
    runner: SlotModelRunner, cells: Sequence[tuple[int, int]], num_rounds: int
) -> dict[tuple[int, int], list[float]]:
    """Return the seconds of a decode step of every batch and context, in a random order a round."""
    order, draw = list(cells), random.Random(0)
    seconds: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for number in range(num_rounds + 1):  # the first round warms up
        draw.shuffle(order)
        for batch, context in order:
            runner.cache.lengths[:batch] = context - 1
            step = ScheduledBatch(decode_ids=(1,) * batch)
            started = time.perf_counter()
            runner.run(step)
            if number > 0:
                seconds[batch, context].append(time.perf_counter() - started)
    return seconds


@click.command()
@click.argument("package", type=click.Path(exists=True, path_type=Path))
@click.option("--batches", default="1,2,4,8,16,32,64", show_default=True)
@click.option("--contexts", default="128,256,512,1024", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Writes OUT.json, .png")
def main(package: Path, batches: str, contexts: str, rounds: int, out: Path) -> None:
    """Time decode steps of PACKAGE, a decoder, without engine and sampler."""
    loaded = load_package(package)
    contract = generation_contract(loaded)
    if contract.cross_cache is not None:
        raise LoadTestError(f"{loaded.manifest.name} is not a decoder; give one")
    cells = [(b, c) for c in _numbers(contexts) for b in _numbers(batches)]
    longest = max(context for _, context in cells)
    if longest > contract.cache.max_len:
        raise LoadTestError(
            f"context {longest} is more than the {contract.cache.max_len} of this model"
        )
    num_threads = num_cores()
    machine = measure_machine(num_threads)
    path = loaded.file("decoder.onnx")
    slots = max(batch for batch, _ in cells)
    runner = SlotModelRunner.load(contract, path, None, num_slots=slots)
    _fill(runner, longest)
    model = _model(path)
    found = measure_steps(runner, cells, rounds)
    steps = [Step(b, c, tuple(found[b, c]), model.floor(machine, contract, b, c)) for b, c in cells]
    _write(out, loaded.manifest.name, machine, model, steps)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _fill(runner: SlotModelRunner, length: int) -> None:
    """Write to the whole cache: memory that was never written is read from one page of zeros."""
    draw = np.random.default_rng(0)
    rows = runner.cache.rows
    size = rows.read(0, length).shape
    for row in range(runner.num_slots):
        rows.write(row, draw.standard_normal(size, np.float32))


def _model(decoder: Path) -> Model:
    """Take every byte beside the graph as read: a table of positions is small."""
    size = decoder.with_name(f"{decoder.name}.data").stat().st_size
    return Model(size, size // _BYTES_PER_NUMBER)


def _write(out: Path, name: str, machine: Machine, model: Model, steps: Sequence[Step]) -> None:
    content = {
        "model": name,
        "machine": {"name": machine_name(), **asdict(machine)},
        "weights": asdict(model),
        "steps": [{**asdict(step), "median": step.median} for step in steps],
    }
    write_result(content, out)
    _draw(name, machine, steps, out.with_suffix(".png"))
    for step in steps:
        click.echo(
            f"batch {step.batch}, context {step.context}: {step.median * 1000:.2f} ms, "
            f"floor {step.floor * 1000:.2f} ms, {step.median / step.floor:.2f} times"
        )


def _draw(name: str, machine: Machine, steps: Sequence[Step], path: Path) -> None:
    figure = Figure(figsize=(8, 5.5), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    axes.set_title(
        f"{name}: time of a decode step; dashed, what {machine.bytes_per_second / 1e9:.0f} GB/s "
        f"and {machine.flops_per_second / 1e9:.0f} GFLOP/s allow",
        loc="left",
        fontsize=10,
    )
    for colour, context in zip(
        ("#56b4e9", "#0072b2", "#e69f00", "#d55e00", "#009e73", "#cc79a7") * 8,
        dict.fromkeys(step.context for step in steps),
        strict=False,
    ):
        own = [step for step in steps if step.context == context]
        batches = [step.batch for step in own]
        times, floors = [s.median * 1000 for s in own], [s.floor * 1000 for s in own]
        axes.plot(batches, times, "o-", color=colour, label=f"context {context}")
        axes.plot(batches, floors, "--", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("sequences in the batch")
    axes.set_ylabel("milliseconds")
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.legend(frameon=False)
    write_figure(figure, path)
