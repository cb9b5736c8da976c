"""Every family at its smallest published shape, with random weights, against transformers.

`python -m loadtest.lab.peers.families gpt2 pythia-14m --out loadtest/results/families.json`

A model is made, saved, imported and compared with its original, and exported with its certificate.
One that writes is served by the engine: its greedy tokens are to be those of `generate`, with an
encoder those of a search of 4 beams too. A run in which half of the answers or more are the same
shows nothing, and fails. Texts have up to 128 tokens, which those are. With --no-export a model is
imported and compared alone: for those whose certificate takes too long.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Container
from pathlib import Path
from typing import Any, get_args

import click

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.machine import machine_name
from engine.package.manifest import Proof
from engine.package.package import load_package
from engine.requests.defaults import sampling_params
from engine.requests.events import SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from exporter.checkpoint import load_checkpoint
from exporter.compare.original import NOT_COMPARED
from exporter.export import export_package
from exporter.imports import Options, import_model
from loadtest.lab.peers.family_shapes import SHAPES, FamilyShape
from loadtest.lab.peers.family_twins import (
    NUM_BEAMS,
    NUM_PROMPTS,
    NUM_TOKENS,
    TwinAnswers,
    answers_of,
    make_twin,
    num_parameters,
)
from loadtest.origin import code_commit, now, versions_of
from loadtest.result_file import write_document

Line = dict[str, Any]  # the findings for one shape


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SHAPES)), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON to write.")
@click.option("--no-export", is_flag=True, help="Import and compare, and export nothing.")
@click.option("--proof", type=click.Choice(get_args(Proof)), default="standard", show_default=True)
def main(names: tuple[str, ...], out: Path, no_export: bool, proof: Proof) -> None:
    """Hold the families NAMES against transformers; what --out has of others is kept."""
    lines = json.loads(out.read_text())["families"] if out.exists() else {}
    wrong = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="families-") as directory:
            found = measure(SHAPES[name], Path(directory), None if no_export else proof)
        lines[name] = {**found, "commit": code_commit(), "written_at": now()}
        print(name, json.dumps(lines[name]), flush=True)
        write_document(_document(lines), out)
        wrong += [f"{name}: {problem}" for problem in problems(lines[name])]
    if wrong:
        raise click.ClickException("; ".join(wrong))


def problems(line: Line) -> list[str]:
    """Say what of a line is not as it is to be."""
    found = [
        f"{line[name]} {name.replace('_', ' ')}"
        for name in ("prompts_equal", "beams_equal")
        if name in line and line[name] != f"{NUM_PROMPTS} of {NUM_PROMPTS}"
    ]
    if line.get("distinct_answers", NUM_PROMPTS) <= NUM_PROMPTS // 2:
        found.append(f"{line['distinct_answers']} answers differ, so equality shows nothing")
    if line.get("original", "").startswith(NOT_COMPARED):
        found.append(line["original"])
    return found


def _document(lines: dict[str, Line]) -> dict[str, object]:
    return {
        "command": shlex.join(["python", "-m", "loadtest.lab.peers.families", *sys.argv[1:]]),
        "commit": code_commit(),
        "machine": machine_name(),
        "written_at": now(),
        "versions": versions_of("onnxruntime", "torch", "transformers"),
        "families": lines,
        "not_measured": _not_measured(lines),
    }


def _not_measured(lines: Container[str]) -> dict[str, str]:
    """Return how large the shapes are that nobody has measured."""
    return {
        name: f"{num_parameters(shape):,} parameters"
        for name, shape in SHAPES.items()
        if name not in lines
    }


def measure(shape: FamilyShape, directory: Path, proof: Proof | None = "standard") -> Line:
    """Return the findings for one shape; without a level of proof it is not exported."""
    # The original is in memory no more when it is imported.
    twin = answers_of(make_twin(shape, directory / "original"), writes=proof is not None)
    started = time.perf_counter()
    options = Options(max_len=shape.max_len)
    _, original = import_model(directory / "original", directory / "checkpoint", options)
    line = {
        "model_type": shape.model_type,
        "parameters": num_parameters(shape),
        "max_len": shape.max_len,
        "import_seconds": round(time.perf_counter() - started, 1),
        "original": original,
    }
    if proof is None:
        return {**line, "exported": False}
    started = time.perf_counter()
    export_package(load_checkpoint(directory / "checkpoint"), directory / "package", proof=proof)
    seconds = round(time.perf_counter() - started, 1)
    compared = _compare_answers(directory / "package", twin)
    return {**line, "proof": proof, "export_seconds": seconds, **compared}


def _compare_answers(package: Path, twin: TwinAnswers) -> Line:
    """Compare what a package writes with what its twin wrote; nothing, if they only read."""
    equal = {
        name: _equal(asyncio.run(_answers(package, twin.prompts, width)), twin.answers[width])
        for name, width in (("prompts_equal", 1), ("beams_equal", NUM_BEAMS))
        if width in twin.answers
    }
    if not equal:
        return {}
    greedy = twin.answers[1]
    return {
        **equal,
        "tokens": sum(map(len, greedy)),
        "distinct_answers": len(set(map(tuple, greedy))),
    }


def _equal(answers: list[list[int]], expected: list[list[int]]) -> str:
    equal = sum(answer == tokens for answer, tokens in zip(answers, expected, strict=True))
    return f"{equal} of {len(expected)}"


async def _answers(path: Path, prompts: list[list[int]], num_beams: int) -> list[list[int]]:
    package = load_package(path)
    strategy = {"strategy": "beam", "beam_width": num_beams} if num_beams > 1 else {}
    asked = {"strategy": "greedy", **strategy, "max_new_tokens": NUM_TOKENS}
    params = sampling_params(asked, package.manifest.defaults)
    engine = load_engine(package, EngineConfig(max_num_seqs=NUM_PROMPTS))
    assert isinstance(engine, AsyncEngine)
    await engine.start()
    try:
        answers = (_answer(engine, i, prompt, params) for i, prompt in enumerate(prompts))
        return list(await asyncio.gather(*answers))
    finally:
        await engine.stop()


async def _answer(
    engine: AsyncEngine, number: int, prompt: list[int], params: SamplingParams
) -> list[int]:
    events = engine.generate(GenerationRequest(str(number), tuple(prompt), params))
    (answer,) = [event async for event in events if isinstance(event, SequenceFinished)]
    return list(answer.token_ids)


if __name__ == "__main__":
    main()
