"""Every family at its smallest published shape, with random weights, against transformers.

`python -m loadtest.peers.families gpt2 pythia-14m --out loadtest/results/families.json`

A model is made, saved, imported, exported with its certificate, and one that writes is served by
the engine: its greedy tokens are to be those of `generate`, with an encoder those of a search of 4
beams too. Logits are to be within 1e-4, where the largest is above 16 within 1e-4 for every 16 of
it. A run in which half of the answers or more are the same shows nothing, and fails. Texts have up
to 128 tokens, which those are: a certificate tries all lengths that there are, to the longest.
With --logits-only a model is not exported: for those whose certificate takes too long.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.machine import machine_name
from engine.package.package import load_package
from engine.requests.defaults import sampling_params
from engine.requests.events import SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from exporter.checkpoint import Checkpoint, load_checkpoint
from exporter.export import export_package
from exporter.huggingface import import_checkpoint
from loadtest.origin import code_commit, now, versions_of
from loadtest.peers.family_shapes import SHAPES, FamilyShape
from loadtest.peers.family_twins import make_twin, num_parameters
from loadtest.peers.twin_outputs import (
    NUM_BEAMS,
    NUM_PROMPTS,
    NUM_TOKENS,
    TwinOutputs,
    outputs_of,
)
from loadtest.result_file import write_document

TOLERANCE, FULL_SIZE = 1e-4, 16.0  # per logit, and how large it may be without more

Line = dict[str, Any]  # the findings for one shape


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SHAPES)), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON to write.")
@click.option("--logits-only", is_flag=True, help="Import, compare logits, and export nothing.")
def main(names: tuple[str, ...], out: Path, logits_only: bool) -> None:
    """Hold the families NAMES against transformers; what --out has of others is kept."""
    lines = json.loads(out.read_text())["families"] if out.exists() else {}
    wrong = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="families-") as directory:
            found = measure(SHAPES[name], Path(directory), logits_only=logits_only)
        lines[name] = {**found, "commit": code_commit(), "written_at": now()}
        print(name, json.dumps(lines[name]), flush=True)
        write_document(_document(lines, out), out)
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
    if line["distinct_answers"] <= NUM_PROMPTS // 2:
        found.append(f"{line['distinct_answers']} answers differ, so equality shows nothing")
    allowed = TOLERANCE * max(line["largest_logit"] / FULL_SIZE, 1)
    for side in ("eager", "certificate") if line.get("exported", True) else ("eager",):
        if not (difference := line[f"largest_logit_difference_{side}"]) <= allowed:
            found.append(f"logits ({side}) differ by {difference:g}, allowed {allowed:g}")
    return found


def _document(lines: dict[str, Line], out: Path) -> dict[str, object]:
    bare = [name for name, line in lines.items() if not line.get("exported", True)]
    whole = [name for name in lines if name not in bare]
    return {
        "command": _command(whole, out),
        "command_of_logits": _command([*bare, "--logits-only"], out) if bare else None,
        "commit": code_commit(),
        "machine": machine_name(),
        "written_at": now(),
        "versions": versions_of("onnxruntime", "torch", "transformers"),
        "families": lines,
        "not_measured": _not_measured(lines),
    }


def _command(arguments: Sequence[str], out: Path) -> str:
    return shlex.join(["python", "-m", "loadtest.peers.families", *arguments, f"--out={out}"])


def _not_measured(lines: Container[str]) -> dict[str, str]:
    """Return how large the shapes are that nobody has measured."""
    return {
        name: f"{num_parameters(shape):,} parameters"
        for name, shape in SHAPES.items()
        if name not in lines
    }


def measure(shape: FamilyShape, directory: Path, *, logits_only: bool = False) -> Line:
    """Return what was found of one shape; its original is in memory no more when it is imported."""
    twin = outputs_of(make_twin(shape, directory / "original"), logits_only=logits_only)
    started = time.perf_counter()
    import_checkpoint(directory / "original", directory / "checkpoint", max_len=shape.max_len)
    import_seconds = time.perf_counter() - started
    checkpoint = load_checkpoint(directory / "checkpoint")
    line = {
        "model_type": shape.model_type,
        "parameters": num_parameters(shape),
        "max_len": shape.max_len,
        "import_seconds": round(import_seconds, 1),
        **_compare_logits(checkpoint.model, twin),
    }
    if logits_only:
        return {**line, "exported": False}
    exported = _export(checkpoint, directory / "package")
    return {**line, **_compare_answers(directory / "package", twin), **exported}


@torch.no_grad()
def _compare_logits(model: Any, twin: TwinOutputs) -> Line:
    """Compare the logits of an imported model, which is not exported, with those of its twin."""
    ours = torch.cat([_logits(model, given) for given in twin.inputs])
    theirs = torch.cat(twin.logits)
    last = [tuple(logits[-1].mul(1000).round().tolist()) for logits in twin.logits]
    return {
        "distinct_answers": len(set(last)),
        "largest_logit": float(theirs.abs().max()),
        "largest_logit_difference_eager": float((ours - theirs).abs().max()),
    }


def _logits(model: Any, given: Tensor) -> Tensor:
    """Return (tokens, words) of a writer, (1, classes) of what reads texts or sees pictures."""
    match model.config.architecture:
        case "encoder-decoder":
            output = model(given, given)
        case "encoder":
            output = model(given, torch.ones_like(given).bool())
        case _:
            output = model(given)
    logits: Tensor = output[0]
    return logits


def _compare_answers(package: Path, twin: TwinOutputs) -> Line:
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


def _export(checkpoint: Checkpoint, package: Path) -> Line:
    started = time.perf_counter()
    manifest = export_package(checkpoint, package)
    return {
        "largest_logit_difference_certificate": manifest.certificate.max_abs_logit_diff,
        "export_seconds": round(time.perf_counter() - started, 1),
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
