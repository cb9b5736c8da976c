"""The study of kernels: what of a step onnxruntime's kernels take, by kind of node.

`python -m loadtest.studies.kernels packages/gpt2-int8 --rows 1,8,32
--out loadtest/results/kernels-gpt2-int8`

Two inner loops of the engine, as it runs them on a CPU, get the same work in turns: bursts of
prompts with one new token each, then whole answers. One is timed; the graphs of the other write
down when each kernel ran. So the first says what a step takes, and the second what its kernels
take. That they are written down makes steps longer, and kernels of a few rows, too.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import click

from engine.config import EngineConfig
from engine.factory import core_on_slots
from engine.machine import num_cores
from engine.package.package import Package, load_package
from engine.requests.request import SamplingParams
from engine.scheduling.output import TokensOutput
from engine.scheduling.sequence import TokenRequest
from engine.session import Session, create_session
from engine.slots.runner import SlotModelRunner
from engine.slots.threads import decoder_threads
from engine.slots.warm_up import warm_up
from loadtest.benchmark.engine_bench import settings_for
from loadtest.benchmark.work import BenchmarkWork, check_fits, generation_contract, random_prompts
from loadtest.studies.heading import write_result

_IDS = count()
_MS = 1e-6  # in a nanosecond


class Span(NamedTuple):
    """One step, or several, by `time.time_ns`."""

    began: int
    ended: int
    in_model: float  # milliseconds of it in calls of the graphs

    @property
    def milliseconds(self) -> float:
        """The duration."""
        return (self.ended - self.began) * _MS


class Kernel(NamedTuple):
    """One run of a node."""

    graph: str
    kind: str  # the node's
    began: int  # by `time.time_ns`
    milliseconds: float  # without the nodes of its branches


class Round(NamedTuple):
    """The steps of one burst of prompts, and of the answers to another."""

    prompts: list[Span]  # one
    decode: list[Span]  # steps in which every sequence gets one more token


class Loop:
    """The engine's inner loop on a package, whose graphs may write down what their kernels do."""

    def __init__(
        self, package: Package, num_rows: int, num_threads: int, profile: Path | None = None
    ) -> None:
        """`profile` is a folder for what they write."""
        contract = generation_contract(package)

        def session(name: str, threads: int) -> Session:
            file = None if profile is None else profile / name
            return create_session(package.file(name), num_threads=threads, profile=file)

        threads = decoder_threads(contract, num_threads)
        self._sessions = {"decoder": session("decoder.onnx", threads)}
        if contract.cross_cache is not None:
            self._sessions["encoder"] = session("encoder.onnx", num_threads)
        encoder = self._sessions.get("encoder")
        runner = SlotModelRunner(contract, self._sessions["decoder"], encoder, num_slots=num_rows)
        warm_up(runner, contract, package.path)
        settings = settings_for(package, num_rows, EngineConfig(num_threads=num_threads))
        self._core = core_on_slots(settings, contract, runner)

    def answer(self, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> Iterator[Span]:
        """Answer prompts that come at once; give the steps that bring nobody's first token."""
        params = SamplingParams(max_new_tokens=num_new_tokens, ignore_eos=True)
        for prompt, key in zip(prompts, _IDS, strict=False):
            self._core.scheduler.add(TokenRequest(key, "", tuple(prompt), params, 0, 0.0))
        begun: set[int] = set()
        while self._core.has_requests:  # not `has_work`: the cache shrinks when idle
            before, began = self._core.times, time.time_ns()
            outputs = self._core.step()
            ended, times = time.time_ns(), self._core.times.since(before)
            told = {output.key for output in outputs if isinstance(output, TokensOutput)}
            if len(begun & told) == len(prompts):
                yield Span(began, ended, 1e3 * times.model)
            begun |= told

    def round(self, work: BenchmarkWork, num_rows: int, vocab_size: int, number: int) -> Round:
        """Read prompts with one new token each, then answer others; never the same ones."""
        alone, others = (
            random_prompts(work, num_rows, vocab_size, 2 * number + part) for part in (0, 1)
        )
        before, began = self._core.times, time.time_ns()
        assert not list(self.answer(alone, 1)), "every token is a first one"
        burst = Span(began, time.time_ns(), 1e3 * self._core.times.since(before).model)
        decode = list(self.answer(others, work.num_new_tokens))
        if not decode:
            raise click.ClickException(
                f"of {num_rows} sequences the first end before the last have begun, so no step "
                "decodes all of them; give more --new-tokens, or fewer --rows"
            )
        return Round([burst], decode)

    def kernels(self) -> list[Kernel]:
        """Return all that ran, in order; nothing is written down from then on."""
        found = [
            kernel
            for name, session in self._sessions.items()
            for kernel in read_profile(name, *session.end_profile())
        ]
        return sorted(found, key=lambda kernel: kernel.began)


def read_profile(graph: str, file: Path, start: int) -> list[Kernel]:
    """Return what a file of onnxruntime's profiler says of kernels; it counts from `start`."""
    events = [
        event
        for event in json.loads(file.read_text())
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time")
    ]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    own = [event["dur"] for event in events]
    around: list[int] = []  # nodes that have not ended, of which each holds the next
    for i, event in enumerate(events):
        while around and event["ts"] >= _end(events[around[-1]]):
            around.pop()
        if around:
            own[around[-1]] -= event["dur"]
        around.append(i)
    return [
        Kernel(graph, event["args"]["op_name"], start + 1000 * event["ts"], time / 1000)
        for event, time in zip(events, own, strict=True)
    ]


def _end(event: Mapping[str, int]) -> int:
    return event["ts"] + event["dur"]


def by_kind(spans: Iterable[Span], kernels: Sequence[Kernel]) -> dict[str, float]:
    """Return the milliseconds of each kind of node in a span, the median of all, largest first."""
    sums: list[dict[str, float]] = []
    left = iter(kernels)
    kernel = next(left, None)
    for span in spans:
        found: dict[str, float] = defaultdict(float)
        while kernel is not None and kernel.began < span.ended:
            if kernel.began >= span.began:
                found[f"{kernel.graph}: {kernel.kind}"] += kernel.milliseconds
            kernel = next(left, None)
        sums.append(found)
    kinds = {kind for found in sums for kind in found}
    medians = {kind: statistics.median(found.get(kind, 0.0) for found in sums) for kind in kinds}
    return dict(sorted(medians.items(), key=lambda item: -item[1]))


def summary(
    timed: Sequence[Span], written: Sequence[Span], kernels: Sequence[Kernel]
) -> dict[str, object]:
    """Return what a step takes, and its kernels of it; medians, in milliseconds."""
    kinds = by_kind(written, kernels)
    return {
        "step_ms": statistics.median(span.milliseconds for span in timed),
        "calls_ms": statistics.median(span.in_model for span in timed),
        "written_step_ms": statistics.median(span.milliseconds for span in written),
        "kernels_ms": sum(kinds.values()),
        "kinds_ms": kinds,
    }


def peers_of(file: Path, num_rows: int) -> dict[str, dict[str, float]]:
    """Return what the engines of a comparison take for prompts and for a step, in milliseconds."""
    found = json.loads(file.read_text())
    num_tokens = num_rows * found["work"]["num_prompt_tokens"]
    return {
        line["engine"]: {
            "prompts": 1e3 * num_tokens / line["prefill_tokens_per_second"],
            "decode": 1e3 * num_rows / line["decode_tokens_per_second"],
        }
        for line in found["lines"]
        if line["concurrency"] == num_rows
    }


def measure(
    package: Package, rows: Sequence[int], work: BenchmarkWork, num_threads: int, num_rounds: int
) -> dict[int, dict[str, dict[str, object]]]:
    """Let both loops work in turns; a round before the first warms up."""
    vocab_size = generation_contract(package).prompt_vocab_size
    with tempfile.TemporaryDirectory() as folder:
        make = partial(Loop, package, max(rows), num_threads)
        timed, written = make(), make(Path(folder))
        found: dict[int, tuple[list[Round], list[Round]]] = {n: ([], []) for n in rows}
        numbers = count()
        for num_rows, rounds in found.items():  # one after the other: the next one has its memory
            for number in range(num_rounds + 1):
                for loop, own in zip((timed, written), rounds, strict=True):
                    one = loop.round(work, num_rows, vocab_size, next(numbers))
                    if number > 0:
                        own.append(one)
        kernels = written.kernels()
    return {num_rows: _summaries(*rounds, kernels) for num_rows, rounds in found.items()}


def _summaries(
    timed: Sequence[Round], written: Sequence[Round], kernels: Sequence[Kernel]
) -> dict[str, dict[str, object]]:
    def spans(rounds: Sequence[Round], part: str) -> list[Span]:
        return [span for one in rounds for span in getattr(one, part)]

    return {
        part: summary(spans(timed, part), spans(written, part), kernels) for part in Round._fields
    }


@click.command()
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rows", default="1,8,32", show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(2), default=32, show_default=True)
@click.option("--threads", type=click.IntRange(0), default=0, show_default=True, help="0: a core.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--beside",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A result of loadtest.peers for the same work, whose times are put beside.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(
    package: Path,
    rows: str,
    prompt_tokens: int,
    new_tokens: int,
    threads: int,
    rounds: int,
    beside: Path | None,
    out: Path,
) -> None:
    """Say what of the steps of PACKAGE kernels take on a CPU, and write OUT.json."""
    loaded = load_package(package)
    work = BenchmarkWork(num_prompt_tokens=prompt_tokens, num_new_tokens=new_tokens)
    check_fits(work, generation_contract(loaded))
    num_threads = threads or num_cores()
    found = measure(loaded, [int(n) for n in rows.split(",")], work, num_threads, rounds)
    cells: dict[int, Mapping[str, object]] = {
        n: {**cell, **({"compared_ms": peers_of(beside, n)} if beside else {})}
        for n, cell in found.items()
    }
    about = {"model": loaded.manifest.name, "weights": loaded.manifest.weights}
    write_result("loadtest.studies.kernels", {**about, "threads": num_threads, "rows": cells}, out)
    for n, cell in found.items():
        for part, of in cell.items():
            click.echo(
                f"{n} rows, {part}: {of['step_ms']:.2f} ms; written down "
                f"{of['written_step_ms']:.2f} ms, of which kernels {of['kernels_ms']:.2f}"
            )


if __name__ == "__main__":
    main()
