"""The alignment that the engine returns is the eager model's attention to the source."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenweir import AsyncClient
from torch import nn

from engine import session
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.factory import load_engine, load_parts
from engine.generation.async_engine import AsyncEngine
from engine.package.package import load_package
from engine.requests.events import SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from engine.slots.batch import Encode, PrefillChunk, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from exporter.models.attention import record_probabilities
from server.config import WorkerConfig
from server.worker.worker import Worker
from tests.parity.conftest import BOS, CPU, VOCAB_SIZE, Exported, Setup, setups
from tests.parity.near import MAX_RATIO

# Prompts in chunks of four, and fewer rows than sequences: they wait, join, leave and move.
ENGINE = EngineConfig(
    max_num_seqs=5, max_num_batched_tokens=24, prefill_chunk_size=4, num_threads=1
)
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=7, ignore_eos=True),
    "sampling": SamplingParams(strategy="sampling", seed=3, num_outputs=3, max_new_tokens=6),
    "best_of": SamplingParams(strategy="sampling", seed=4, best_of=4, max_new_tokens=6),
    "beam": SamplingParams(strategy="beam", beam_width=4, num_outputs=3, max_new_tokens=9),
    "wide beam": SamplingParams(
        strategy="beam", beam_width=5, num_outputs=5, max_new_tokens=5, ignore_eos=True
    ),
}


@pytest.fixture
def made(exported: Callable[..., Exported]) -> Exported:
    return exported("encoder-decoder")


@pytest.fixture
def bound_outputs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the outputs that are bound from now on."""
    names: list[str] = []
    bind = session.Binding.output

    def record(self: session.Binding, name: str, array: np.ndarray) -> None:
        names.append(name)
        bind(self, name, array)

    monkeypatch.setattr(session.Binding, "output", record)
    return names


def eager_attention(
    model: nn.Module, source: Sequence[int], prefix: Sequence[int], generated: Sequence[int]
) -> np.ndarray:
    """Return the attention behind which each generated token was chosen, [generated, source]."""
    target = [BOS, *prefix, *generated[:-1]]
    with record_probabilities(model) as recorded, torch.inference_mode():
        model(torch.tensor([source]), torch.tensor([target]))
    of_heads = recorded["decoder.layers.0.cross_attention"]  # (1, heads, T, S)
    return of_heads.mean(dim=1)[0, len(prefix) :].numpy()


async def answers(
    package: Path, requests: Sequence[GenerationRequest], setup: Setup = CPU
) -> list[list]:
    """Run requests together; return the finished sequences of each."""
    engine = setup.load(package, ENGINE)
    await engine.start()

    async def ask(number: int, request: GenerationRequest) -> list[SequenceFinished]:
        await asyncio.sleep(0.002 * number)
        events = [event async for event in engine.generate(request)]
        return [event for event in events if isinstance(event, SequenceFinished)]

    try:
        return await asyncio.gather(*(ask(i, request) for i, request in enumerate(requests)))
    finally:
        await engine.stop()


def make_request(number: int, params: SamplingParams, num_prefix: int = 0) -> GenerationRequest:
    rng = np.random.default_rng(number)
    source = tuple(rng.integers(3, VOCAB_SIZE, rng.integers(1, 21)).tolist())
    prefix = tuple(rng.integers(3, VOCAB_SIZE, num_prefix).tolist())
    return GenerationRequest(f"request-{number}", source, params, target_prefix=prefix)


@pytest.mark.parametrize("setup", setups())
async def test_alignment_is_the_eager_attention_while_others_run_that_want_none(
    setup: Setup, exported: Callable[..., Exported]
) -> None:
    checkpoint, package = exported("encoder-decoder", setup.form)
    asking = [
        make_request(i, replace(params, alignment=True), num_prefix)
        for i, (num_prefix, params) in enumerate(product((0, 1, 3, 6) * 2, PARAMS.values()))
    ]
    others = cycle(make_request(50 + i, other) for i, other in enumerate(PARAMS.values()))
    mixed = [request for pair in zip(asking, others, strict=False) for request in pair]

    found = await answers(package, mixed, setup)

    in_half = copy.deepcopy(checkpoint.model).half()
    assert all(found)
    for request, sequences in zip(mixed, found, strict=True):
        for sequence in sequences:
            if not request.params.alignment:
                assert sequence.alignment == ()
                continue
            prefix = request.target_prefix
            generated = sequence.token_ids[len(prefix) :]
            expected = eager_attention(checkpoint.model, request.prompt, prefix, generated)
            atol = 1e-5
            if setup.form.precision == "fp16":
                half = eager_attention(in_half, request.prompt, prefix, generated)
                atol = MAX_RATIO * float(np.abs(half - expected).max())
            np.testing.assert_allclose(sequence.alignment, expected, atol=atol)
            np.testing.assert_allclose(np.sum(sequence.alignment, axis=1), 1, atol=1e-5)


async def test_what_is_answered_does_not_depend_on_the_wish_for_alignment(made: Exported) -> None:
    requests = [make_request(i, params) for i, params in enumerate(PARAMS.values())]
    asking = [replace(r, params=replace(r.params, alignment=True)) for r in requests]

    without, with_alignment = await answers(made[1], requests), await answers(made[1], asking)

    for one, other in zip(without, with_alignment, strict=True):
        assert one == [replace(sequence, alignment=()) for sequence in other]


async def test_equal_sources_share_a_row_and_have_their_alignment_each(made: Exported) -> None:
    checkpoint, package = made
    params = replace(PARAMS["greedy"], alignment=True)
    source = tuple(range(3, 15))
    requests = [
        GenerationRequest(f"r{i}", source, params, target_prefix=(3 + i,)) for i in range(8)
    ]

    found = await answers(package, requests)

    for request, (sequence,) in zip(requests, found, strict=True):
        prefix = request.target_prefix
        expected = eager_attention(checkpoint.model, source, prefix, sequence.token_ids[1:])
        np.testing.assert_allclose(sequence.alignment, expected, atol=1e-5)


@pytest.mark.parametrize("beam", [None, 4])
async def test_alignment_reaches_the_client(beam: int | None, made: Exported) -> None:
    checkpoint, package = made
    worker = Worker({"tiny": load_engine(load_package(package), ENGINE)}, WorkerConfig())
    source = tuple(range(3, 15))

    try:
        async with AsyncClient(await worker.start(), timeout=60) as client:
            options = {"alignment": True, "max_new_tokens": 6, "ignore_eos": True, "beam": beam}
            whole = await client.generate("tiny", source, **options)
            stream = client.stream("tiny", source, **options)
            [piece async for piece in stream]
            without = await client.generate("tiny", source, max_new_tokens=1)
    finally:
        await worker.drain(0)

    (answer,) = whole.sequences
    expected = eager_attention(checkpoint.model, source, (), answer.token_ids)
    np.testing.assert_allclose(answer.alignment, expected, atol=1e-5)
    assert stream.result.sequences[0].alignment == answer.alignment
    pieces = tuple(letter.encode() for letter in "abcdefghijkl")
    assert whole.source_pieces == stream.result.source_pieces == pieces
    assert without.source_pieces == ()


async def test_a_package_without_the_output_refuses_alignment_and_does_not_offer_it(
    made: Exported,
) -> None:
    package = load_package(made[1])
    parts = load_parts(package, ENGINE, print)
    manifest = package.manifest
    assert manifest.generation is not None and manifest.generation.alignment
    contract = manifest.generation.model_copy(update={"alignment": False})
    older = package.model_copy(
        update={"manifest": manifest.model_copy(update={"generation": contract})}
    )
    with_old = AsyncEngine(
        older,
        parts.core,
        parts.tokenizers,
        ENGINE,
        constraints=parts.constraints,
    )
    await with_old.start()

    try:
        assert "alignment" not in with_old.capabilities
        with pytest.raises(InvalidRequest, match="gives no attention"):
            request = make_request(1, SamplingParams(alignment=True))
            [event async for event in with_old.generate(request)]
    finally:
        await with_old.stop()


def test_the_output_is_bound_only_in_steps_that_want_it(
    made: Exported, bound_outputs: list[str]
) -> None:
    package = load_package(made[1])
    contract = package.manifest.generation
    assert contract is not None
    runner = SlotModelRunner.load(
        contract,
        package.file("decoder.onnx"),
        package.file("encoder.onnx"),
        num_slots=4,
        num_threads=1,
    )
    encodes = tuple(Encode(row, (4 + row, 5, 6)) for row in range(3))
    chunk = PrefillChunk(2, (1, 7, 8), num_logits=2, source_row=2)
    plain = ScheduledBatch((), encodes, (chunk,), (1, 1), decode_sources=(0, 1))

    first = runner.run(plain)
    assert "alignment" not in bound_outputs and first.alignment is None

    asked = plain._replace(encodes=(), aligned=(1, 3))
    second = runner.run(asked)
    assert bound_outputs.count("alignment") == 2  # in the decode call, and in that of the chunk
    assert second.alignment is not None and second.alignment.shape == (2, 20)
    np.testing.assert_allclose(second.alignment.sum(axis=1), 1, atol=1e-6)

    runner.run(plain._replace(encodes=()))
    assert bound_outputs.count("alignment") == 2
