"""Every family at its smallest published shape, with random weights, against transformers.

`python -m loadtest.peers.families gpt2 pythia-14m --out loadtest/results/families.json`

A model is made, saved, imported, exported with its certificate, and served by the engine: its
greedy tokens are to be those of `generate`, with an encoder those of a search of 4 beams too, its
logits within 1e-4.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.machine import machine_name
from engine.package.package import load_package
from engine.requests.defaults import sampling_params
from engine.requests.events import SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from exporter.checkpoint import load_checkpoint
from exporter.export import export_package
from exporter.huggingface import import_checkpoint
from loadtest.origin import code_commit, now, versions_of
from loadtest.peers.family_shapes import SHAPES, FamilyShape
from loadtest.peers.models import save_source
from loadtest.result_file import write_document

NUM_PROMPTS, NUM_TOKENS, NUM_BEAMS = 8, 64, 4
PROMPT_LENGTHS = (1, 2, 5, 12, 25, 50, 50, 50)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SHAPES)), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON to write.")
def main(names: tuple[str, ...], out: Path) -> None:
    """Hold the families NAMES against transformers; what --out has of others is kept."""
    lines = json.loads(out.read_text())["families"] if out.exists() else {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="families-") as directory:
            lines[name] = measure(SHAPES[name], Path(directory))
        print(name, json.dumps(lines[name]), flush=True)
        write_document(_document(lines), out)


def _document(lines: dict[str, Any]) -> dict[str, object]:
    module = ["python", "-m", "loadtest.peers.families", *sys.argv[1:]]
    return {
        "command": shlex.join(module),
        "commit": code_commit(),
        "machine": machine_name(),
        "written_at": now(),
        "versions": versions_of("onnxruntime", "torch", "transformers"),
        "families": lines,
    }


def measure(shape: FamilyShape, directory: Path) -> dict[str, object]:
    """Return what was found of one shape; AssertionError where tokens differ."""
    twin = _make(shape, directory / "source")
    started = time.perf_counter()
    imported = import_checkpoint(
        directory / "source", directory / "checkpoint", max_len=shape.max_len
    )
    import_seconds = time.perf_counter() - started
    prompts = _prompts(twin)
    logit_difference = _logit_difference(twin, directory / "checkpoint", prompts)
    widths = (1, NUM_BEAMS) if twin.config.is_encoder_decoder else (1,)
    expected = {width: [_generate(twin, prompt, width) for prompt in prompts] for width in widths}
    del twin
    shutil.rmtree(directory / "source")
    started = time.perf_counter()
    manifest = export_package(directory / "checkpoint", directory / "package")
    export_seconds = time.perf_counter() - started
    answers = {
        width: asyncio.run(_answers(directory / "package", prompts, width)) for width in widths
    }
    beams = {"beams_equal": _equal(answers[NUM_BEAMS], expected[NUM_BEAMS])} if widths[1:] else {}
    return {
        "model_type": shape.model_type,
        "parameters": imported.num_parameters,
        "prompts_equal": _equal(answers[1], expected[1]),
        **beams,
        "tokens": sum(map(len, expected[1])),
        "distinct_answers": len(set(map(tuple, expected[1]))),
        "largest_logit_difference_eager": logit_difference,
        "largest_logit_difference_certificate": manifest.certificate.max_abs_logit_diff,
        "import_seconds": round(import_seconds, 1),
        "export_seconds": round(export_seconds, 1),
    }


def _equal(answers: list[list[int]], expected: list[list[int]]) -> str:
    equal = sum(answer == tokens for answer, tokens in zip(answers, expected, strict=True))
    return f"{equal} of {len(expected)}"


def _make(shape: FamilyShape, source: Path) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.model_type, **shape.options)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_config(config)
    save_source(model, source)
    return model


def _prompts(twin: Any) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    size = twin.config.vocab_size
    return [
        torch.randint(3, size - 2, (length,), generator=draw).tolist() for length in PROMPT_LENGTHS
    ]


@torch.no_grad()
def _logit_difference(twin: Any, checkpoint: Path, prompts: list[list[int]]) -> float:
    """Return the largest difference of the imported model, which has not been exported yet."""
    model = load_checkpoint(checkpoint).model
    ids = torch.tensor([prompts[-1]])
    if twin.config.is_encoder_decoder:
        return float((model(ids, ids) - twin(ids, decoder_input_ids=ids).logits).abs().max())
    return float((model(ids) - twin(ids).logits).abs().max())


def _generate(twin: Any, prompt: list[int], num_beams: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = twin.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=num_beams,
        max_new_tokens=NUM_TOKENS,
    )
    start = 1 if twin.config.is_encoder_decoder else len(prompt)
    tokens: list[int] = output[0, start:].tolist()
    return tokens


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
