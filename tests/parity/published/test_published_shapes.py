"""Every family at its smallest published shape, with random weights, against transformers.

A model is made, saved, imported and compared with its original, and exported with its certificate.
One that writes is served by the engine: its greedy tokens are to be those of `generate`, with an
encoder those of a search of 4 beams too. A run in which half of the answers or more are the same
shows nothing, and fails. `make test-long` does so with small shapes of four families; published
ones are named, and what is found of them is kept beside what the file has of others:

    FAMILIES=gpt2,pythia-14m KEEP=loadtest/results/families.json \
        pytest -m long tests/parity/published

PROOF is that of `tokenweir export`, or "none": then a model is imported and compared alone, for
those whose certificate takes too long.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import weakref
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.package.manifest import Proof
from engine.package.package import load_package
from engine.requests.defaults import sampling_params
from engine.requests.events import SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from exporter.checkpoint import load_checkpoint
from exporter.compare.original import NOT_COMPARED
from exporter.export import export_package
from exporter.huggingface import FAMILIES, Imported
from exporter.imports import Options, import_model
from loadtest.lab.result import heading
from loadtest.origin import code_commit, now
from loadtest.result_file import write_document
from tests.parity.published.shapes import PLAIN_DEIT, SHAPES, FamilyShape
from tests.parity.published.twins import (
    NUM_BEAMS,
    NUM_PROMPTS,
    NUM_TOKENS,
    TwinAnswers,
    answers_of,
    make_twin,
    num_parameters,
)

pytestmark = pytest.mark.long

KEPT = Path(__file__).parents[3] / "loadtest" / "results" / "families.json"
WRITER = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
T5 = {"vocab_size": 300, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
IMAGES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}
SMALL = {
    "small gpt_neox": FamilyShape("gpt_neox", WRITER, max_len=120),
    "small t5": FamilyShape("t5", {**T5, "decoder_start_token_id": 0}, max_len=70),
    "small bert": FamilyShape("bert", WRITER, max_len=None),
    "small deit": FamilyShape("deit", {**IMAGES, **PLAIN_DEIT}, max_len=None),
}
GOOD: dict[str, Any] = {
    "prompts_equal": "8 of 8",
    "distinct_answers": 8,
    "original": "compared with GPT2LMHeadModel of transformers 5.23.0: 18 inputs",
}
NAMED = [name for name in os.environ.get("FAMILIES", "").split(",") if name]
Line = dict[str, Any]  # the findings for one shape


def measure(shape: FamilyShape, directory: Path, proof: Proof | Literal["none"]) -> Line:
    # The original is in memory no more when it is imported.
    twin = answers_of(make_twin(shape, directory / "original"), writes=proof != "none")
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
    if proof == "none":
        return {**line, "exported": False}
    started = time.perf_counter()
    export_package(load_checkpoint(directory / "checkpoint"), directory / "package", proof=proof)
    seconds = round(time.perf_counter() - started, 1)
    compared = _compare_answers(directory / "package", twin) if twin.answers else {}
    return {**line, "proof": proof, "export_seconds": seconds, **compared}


def _compare_answers(package: Path, twin: TwinAnswers) -> Line:
    found: Line = {}
    for name, width in (("prompts_equal", 1), ("beams_equal", NUM_BEAMS)):
        if expected := twin.answers.get(width):
            answers = asyncio.run(_answers(package, twin.prompts, width))
            equal = sum(one == other for one, other in zip(answers, expected, strict=True))
            found[name] = f"{equal} of {len(expected)}"
    greedy = twin.answers[1]
    distinct = len(set(map(tuple, greedy)))
    return {**found, "tokens": sum(map(len, greedy)), "distinct_answers": distinct}


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


def keep(name: str, line: Line, path: Path) -> None:
    """Write what was found for a shape; what a file has of others stays."""
    lines = json.loads(path.read_text())["families"] if path.exists() else {}
    lines[name] = {**line, "commit": code_commit(), "written_at": now()}
    rest = {
        name: f"{num_parameters(shape):,} parameters"
        for name, shape in SHAPES.items()
        if name not in lines
    }
    settings = (f"{key}={os.environ[key]}" for key in ("FAMILIES", "PROOF") if key in os.environ)
    command = " ".join((*settings, f"KEEP={path.name}", "pytest -m long tests/parity/published"))
    write_document({**heading(), "command": command, "families": lines, "not_measured": rest}, path)


@pytest.mark.timeout(0)
@pytest.mark.usefixtures("traced_anew")  # a file without its weights beside it has 2 GB at most
@pytest.mark.parametrize("name", NAMED or SMALL)
def test_a_family_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    proof = os.environ.get("PROOF", "standard" if NAMED else "quick")

    line = measure({**SMALL, **SHAPES}[name], tmp_path, cast(Any, proof))

    if path := os.environ.get("KEEP"):
        keep(name, line, Path(path))
    assert problems(line) == []


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_a_family_is_compared_without_an_export(shape: FamilyShape, tmp_path: Path) -> None:
    line = measure(shape, tmp_path, "none")

    assert problems(line) == [] and line["exported"] is False
    assert not (tmp_path / "package").exists()


def test_what_is_found_is_kept_beside_what_a_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = {name: SHAPES[name] for name in ("gpt2", "opt-125m", "bert-tiny")}
    monkeypatch.setitem(globals(), "SHAPES", some)
    path = tmp_path / "families.json"
    keep("gpt2", GOOD, path)
    keep("opt-125m", GOOD, path)

    kept = json.loads(path.read_text())

    assert ({*kept["families"]}, {*kept["not_measured"]}) == ({"gpt2", "opt-125m"}, {"bert-tiny"})
    assert kept["command"] and kept["machine"] and kept["families"]["gpt2"]["commit"]


def test_every_family_has_a_published_shape() -> None:
    types = {name for family in FAMILIES for name in family.model_types}

    assert {shape.model_type for shape in SHAPES.values()} == types


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("t5-small", 60_506_624),
        ("flan-t5-small", 76_961_152),
        ("byt5-small", 299_637_760),
        ("mt5-small", 300_176_768),
    ],
)
def test_a_shape_has_the_parameters_of_the_published_model(name: str, published: int) -> None:
    assert num_parameters(SHAPES[name]) == published


def test_a_line_that_holds_has_no_problems() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompts_equal": "7 of 8"}, "7 of 8 prompts equal"),
        ({"beams_equal": "0 of 8"}, "0 of 8 beams equal"),
        ({"distinct_answers": 1}, "1 answers differ, so equality shows nothing"),
        ({"original": f"{NOT_COMPARED}: no memory"}, "no memory"),
    ],
)
def test_a_line_that_does_not_hold_is_named(change: dict[str, Any], problem: str) -> None:
    (found,) = problems({**GOOD, **change})

    assert problem in found


def test_kept_lines_hold() -> None:
    kept = json.loads(KEPT.read_text())

    assert {name: problems(line) for name, line in kept["families"].items() if problems(line)} == {}
    assert {*kept["families"], *kept["not_measured"]} == {*SHAPES}


def test_the_original_is_in_memory_no_more_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []
    make_it, import_it = make_twin, import_model

    def make(shape: FamilyShape, out: Path) -> Any:
        twin = make_it(shape, out)
        made.append(weakref.ref(twin))
        return twin

    def check_and_import(*args: Any) -> tuple[Imported, str]:
        assert made[0]() is None
        return import_it(*args)

    monkeypatch.setitem(globals(), "make_twin", make)
    monkeypatch.setitem(globals(), "import_model", check_and_import)

    measure(SMALL["small bert"], tmp_path, "none")
