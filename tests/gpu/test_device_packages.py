"""Answers of a package on a GPU are proven there, equal whatever the batch and the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.cuda.device import CudaDevice
from engine.errors import PackageError
from engine.factory import load_engine
from engine.one_pass.engine import EncoderEngine
from engine.one_pass.prediction import PredictionItem
from engine.package.package import load_package, read_manifest
from engine.requests.request import SamplingParams
from server.cli.app import run
from tests.gpu.answers import answers, digest, prompts
from tests.gpu.conftest import Certified
from tests.parity.eager import Eager, greedy_search

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

PRECISIONS = ["fp32", "fp16", "bf16"]
ONE_PASS = ["tagging", "digits", "sentiment"]

Make = Callable[[str, str], Certified]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("task", ["dates", *ONE_PASS])
def test_the_certificate_is_of_this_device_and_finds_the_tokens_of_the_eager_model(
    task: str, precision: str, certified: Make, device: CudaDevice
) -> None:
    found = read_manifest(certified(task, precision).package).certificate.device

    assert found is not None
    assert (found.gpu, found.driver) == (device.gpu_name, device.driver)
    assert found.tokens_equal == found.tokens_compared


@pytest.mark.parametrize("precision", PRECISIONS)
def test_decode_calls_of_one_bucket_show_rows_without_neighbours(
    precision: str, certified: Make
) -> None:
    found = read_manifest(certified("dates", precision).package).certificate.device

    assert found is not None and len(found.buckets) == 1
    assert found.batch_invariant


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("task", ONE_PASS)
async def test_a_call_of_as_many_rows_as_were_asked_offers_equal_bits_only_where_shown(
    task: str, precision: str, certified: Make
) -> None:
    """The kernels of a product may depend on its rows; a model of one pass has no bucket."""
    package = load_package(certified(task, precision).package)
    found = package.manifest.certificate.device
    assert found is not None
    engine = load_engine(package, EngineConfig())

    await engine.start()
    try:
        assert ("batch_invariant" in engine.capabilities) == found.batch_invariant
    finally:
        await engine.stop()


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_an_answer_has_the_same_bits_alone_and_among_others(
    precision: str, certified: Make
) -> None:
    package = certified("dates", precision).package

    assert await answers(package, at_once=True) == await answers(package, at_once=False)


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_an_answer_has_the_same_bits_in_another_process(
    precision: str, certified: Make
) -> None:
    package = certified("dates", precision).package
    command = [sys.executable, "-m", "tests.gpu.answers", str(package)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=600)

    assert done.stdout.strip() == digest(await answers(package, at_once=True)), done.stderr


async def test_answers_in_fp32_are_those_of_the_eager_model(certified: Make) -> None:
    checkpoint, path = certified("dates", "fp32")
    asked = prompts(load_package(path))

    found = await answers(path, at_once=True)

    tokens = [answer[0] for answer in found]
    eager = Eager(checkpoint.model)
    assert tokens == [greedy_search(eager, prompt, SamplingParams())[0] for prompt in asked]


async def test_labels_in_fp32_are_those_of_the_eager_model(certified: Make) -> None:
    checkpoint, path = certified("tagging", "fp32")
    assert checkpoint.tokenizer is not None
    texts = ["the cat sat", "a small dog barks", "she reads", "they run in the park"]
    engine = load_engine(load_package(path), EngineConfig())
    assert isinstance(engine, EncoderEngine)
    await engine.start()
    try:
        items = [PredictionItem(text) for text in texts]
        answer = await engine.predict(items, request_id="request", deadline=None)
    finally:
        await engine.stop()

    for text, item in zip(texts, answer.items, strict=True):
        ids = torch.tensor([checkpoint.tokenizer.encode(text).ids])
        with torch.inference_mode():
            expected = checkpoint.model(ids).logits[0].numpy()
        np.testing.assert_allclose(item.logits, expected, atol=1e-4)


def test_a_package_that_was_shown_nothing_there_is_refused_with_the_command(
    certified: Make, tmp_path: Path
) -> None:
    checkpoint, package = certified("dates", "fp16").checkpoint.path, tmp_path / "package"
    form = ("--target", "cuda", "--precision", "fp16")
    assert run(["export", str(checkpoint), "--out", str(package), *form]) == 0

    with pytest.raises(PackageError, match=r"tokenweir verify .* CHECKPOINT --device cuda"):
        load_engine(load_package(package), EngineConfig(max_num_seqs=0))


def test_a_benchmark_runs_there(certified: Make, tmp_path: Path) -> None:
    package, file = certified("dates", "fp16").package, tmp_path / "bench.json"
    work = ("--concurrency", "1,8", "--prompt-tokens", "16", "--new-tokens", "8", "--rounds", "1")

    assert run(["bench", str(package), *work, "--device", "cuda", "--json", str(file)]) == 0

    assert file.is_file()
