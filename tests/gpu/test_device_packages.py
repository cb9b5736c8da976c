"""What a package gives on a GPU: proven there, equal whatever the batch, equal in two processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.device import CudaDevice
from engine.encoder_engine import EncoderEngine
from engine.errors import PackageError
from engine.factory import load_engine
from engine.package import DeviceCertificate, load_package, read_manifest
from engine.prediction import PredictionItem
from engine.request import GenerationRequest, SamplingParams, SequenceFinished
from exporter.device_digest import digest_elsewhere
from exporter.execution import Execution
from server.cli.app import run
from tests.gpu.conftest import Certified
from tests.parity.test_engine import eager_greedy

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

PRECISIONS = ["fp32", "fp16", "bf16"]
MODELS = ["dates", "tagging", "digits", "sentiment"]
NUM_PROMPTS = 24

Make = Callable[[str, str], Certified]
Answer = tuple[tuple[int, ...], float, object]  # tokens, the sum of their logprobs, these


def certificate(certified: Certified) -> DeviceCertificate:
    found = read_manifest(certified.package).certificate.device
    assert found is not None
    return found


def prompts(certified: Certified) -> list[tuple[int, ...]]:
    config = certified.checkpoint.config.model
    rng = np.random.default_rng(0)
    lengths = [1, config.max_source_len, *rng.integers(1, config.max_source_len + 1, NUM_PROMPTS)]
    return [tuple(rng.integers(3, config.vocab_size, n).tolist()) for n in lengths]


async def answers(certified: Certified, *, at_once: bool) -> list[Answer]:
    engine = load_engine(load_package(certified.package), EngineConfig(max_num_seqs=0))
    assert isinstance(engine, AsyncEngine)
    await engine.start()

    async def ask(number: int, prompt: tuple[int, ...]) -> Answer:
        request = GenerationRequest(f"request-{number}", prompt, SamplingParams(logprobs=2))
        events = [event async for event in engine.generate(request)]
        (end,) = (event for event in events if isinstance(event, SequenceFinished))
        return end.token_ids, end.sum_logprob, end.logprobs

    asked = [ask(number, prompt) for number, prompt in enumerate(prompts(certified))]
    try:
        return list(await asyncio.gather(*asked)) if at_once else [await one for one in asked]
    finally:
        await engine.stop()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("task", MODELS)
def test_the_certificate_is_of_this_device_and_shows_rows_without_neighbours(
    task: str, precision: str, certified: Make, device: CudaDevice
) -> None:
    found = certificate(certified(task, precision))

    assert (found.gpu, found.driver) == (device.gpu_name, device.driver)
    assert found.tokens_equal == found.tokens_compared
    assert found.batch_invariant


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_an_answer_has_the_same_bits_alone_and_among_others(
    precision: str, certified: Make
) -> None:
    package = certified("dates", precision)

    assert await answers(package, at_once=True) == await answers(package, at_once=False)


async def test_answers_in_fp32_are_those_of_the_eager_model(certified: Make) -> None:
    package = certified("dates", "fp32")

    found = await answers(package, at_once=True)

    model = package.checkpoint.model
    assert [tokens for tokens, _, _ in found] == [eager_greedy(model, p) for p in prompts(package)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("task", MODELS)
def test_another_process_computes_the_same_bits(
    task: str, precision: str, certified: Make, device: CudaDevice
) -> None:
    package = certified(task, precision)
    found = certificate(package)
    execution = Execution(buckets=found.buckets, device=device)

    assert digest_elsewhere(load_package(package.package), execution) == found.digest


async def test_a_labeller_answers_as_the_eager_model(certified: Make) -> None:
    package = certified("tagging", "fp32")
    tokenizer, model = package.checkpoint.tokenizer, package.checkpoint.model
    assert tokenizer is not None
    texts = ["the cat sat", "a small dog barks", "she reads", "they run in the park"]
    engine = load_engine(load_package(package.package), EngineConfig())
    assert isinstance(engine, EncoderEngine)
    await engine.start()
    try:
        answer = await engine.predict(
            [PredictionItem(text) for text in texts], request_id="request", deadline=None
        )
    finally:
        await engine.stop()

    for text, item in zip(texts, answer.items, strict=True):
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.inference_mode():
            expected = model(ids).logits[0].numpy()
        np.testing.assert_allclose(item.logits, expected, atol=1e-4)


def test_a_package_that_was_shown_nothing_there_is_refused_with_the_command(
    certified: Make, tmp_path: Path
) -> None:
    checkpoint = certified("dates", "fp16").package.parent / "checkpoint"
    package = tmp_path / "package"
    form = ("--target", "cuda", "--precision", "fp16")
    assert run(["export", str(checkpoint), "--out", str(package), *form]) == 0

    with pytest.raises(PackageError, match=r"tokenweir verify .* CHECKPOINT --device cuda"):
        load_engine(load_package(package), EngineConfig(max_num_seqs=0))


def test_a_benchmark_runs_there(certified: Make, tmp_path: Path) -> None:
    package, file = certified("dates", "fp16").package, tmp_path / "bench.json"
    work = ("--concurrency", "1,32", "--prompt-tokens", "16", "--new-tokens", "8", "--rounds", "1")

    assert run(["bench", str(package), *work, "--device", "cuda", "--json", str(file)]) == 0

    assert file.is_file()
