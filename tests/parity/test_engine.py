"""An answer has the same bits whatever others computed before it, and a text its labels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.one_pass.engine import EncoderEngine
from engine.one_pass.prediction import PredictionItem
from engine.package.package import load_package
from engine.requests.events import FinishReason, RequestFinished, SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from tests.parity.conftest import (
    CPU,
    CUDA_FP16,
    CUDA_FP32,
    FAKE_FP32,
    GPU_FP16,
    GPU_FP32,
    VOCAB_SIZE,
    Exported,
    Setup,
)
from tests.parity.near import NEAR, assert_near

# Three rows for twenty requests, prompts in chunks of four: they wait, join, leave and move.
ENGINE = EngineConfig(
    max_num_seqs=3, max_num_batched_tokens=12, prefill_chunk_size=4, num_threads=1
)


def prompts(limit: int) -> Iterator[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    for length in [1, limit, *rng.integers(1, limit + 1, 18)]:
        yield tuple(rng.integers(3, VOCAB_SIZE, length).tolist())


@pytest.mark.parametrize(
    ("family", "setup"),
    [("gpt", CPU), ("encoder-decoder", CPU), ("llama", CUDA_FP16), ("encoder-decoder", CUDA_FP32)],
    ids=["gpt-cpu", "encoder-decoder-cpu", "llama-cuda-fp16", "encoder-decoder-cuda-fp32"],
)
async def test_answers_have_the_same_bits_with_and_without_reuse_of_what_others_computed(
    family: str, setup: Setup, exported: Callable[..., Exported]
) -> None:
    """Twelve requests with two beginnings, or two sources, at any time of each other.

    The sequences of a shared source round otherwise on a CPU in graphs for CUDA.
    """
    _, path = exported(family, setup.form)
    drawn = list(prompts(16))
    beginnings = [(drawn[1] * 2)[:11], (drawn[1][::-1] * 2)[:18]]
    endings = [prompt[: 1 + i % 5] for i, prompt in enumerate(drawn[2:8])]
    is_decoder = family != "encoder-decoder"
    requests = [b + e for e in endings for b in beginnings] if is_decoder else drawn[2:4] * 6

    async def answers(config: EngineConfig) -> tuple[list[tuple[object, ...]], int]:
        engine = setup.load(path, config)
        await engine.start()

        async def ask(number: int, prompt: tuple[int, ...]) -> tuple[tuple[object, ...], int]:
            await asyncio.sleep(0.003 * number)
            asked = GenerationRequest(f"request-{number}", prompt, SamplingParams(logprobs=2))
            events = [event async for event in engine.generate(asked)]
            (end,) = (event for event in events if isinstance(event, SequenceFinished))
            assert isinstance(events[-1], RequestFinished)
            found = (end.token_ids, end.sum_logprob, end.logprobs)
            return found, events[-1].usage.cached_input_tokens

        try:
            asked = [ask(number, prompt) for number, prompt in enumerate(requests)]
            found = await asyncio.gather(*asked)
        finally:
            await engine.stop()
        return [answer for answer, _ in found], sum(cached for _, cached in found)

    cold, none_cached = await answers(replace(ENGINE, reuse_prefixes=False))
    warm, cached = await answers(ENGINE)

    if setup.has_equal_bits(family):
        assert warm == cold
    else:
        assert_near(warm, cold, NEAR[setup.form.precision])
    assert none_cached == 0 and cached > 0


async def test_concurrent_labels_are_those_of_the_eager_model(
    exported: Callable[[str], Exported],
) -> None:
    checkpoint, path = exported("labeller")
    texts = list(prompts(20))
    engine = load_engine(load_package(path), ENGINE)
    assert isinstance(engine, EncoderEngine)
    await engine.start()

    async def ask(number: int, text: tuple[int, ...]) -> np.ndarray:
        answer = await engine.predict(
            [PredictionItem(" ".join(f"w{i}" for i in text))],
            request_id=f"request-{number}",
            deadline=None,
        )
        return answer.items[0].logits

    try:
        answers = await asyncio.gather(*(ask(i, text) for i, text in enumerate(texts)))
    finally:
        await engine.stop()

    for text, logits in zip(texts, answers, strict=True):
        with torch.inference_mode():
            expected = checkpoint.model(torch.tensor([text])).logits[0].numpy()
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    ("family", "setup"),
    [
        pytest.param("gpt", CPU, id="gpt-cpu"),
        pytest.param("encoder-decoder", FAKE_FP32, id="encoder-decoder-fake-gpu"),
        pytest.param("gpt", CPU._replace(own_process=True), id="gpt-own-process"),
        pytest.param("gpt", GPU_FP16, id="gpt-gpu", marks=pytest.mark.gpu),
        pytest.param("encoder-decoder", GPU_FP32, id="encoder-decoder-gpu", marks=pytest.mark.gpu),
    ],
)
async def test_what_needs_no_step_is_answered_alone_and_beside_others(
    family: str, setup: Setup, exported: Callable[..., Exported]
) -> None:
    engine = setup.load(exported(family, setup.form)[1], ENGINE)
    await engine.start()

    async def ask(number: int, most: int) -> RequestFinished:
        params = SamplingParams(max_new_tokens=most, prompt_token_ids=True, ignore_eos=True)
        request = GenerationRequest(f"request-{number}", (5, 6, 7), params)
        *_, sequence, end = [event async for event in engine.generate(request)]
        assert isinstance(sequence, SequenceFinished) and isinstance(end, RequestFinished)
        assert (len(sequence.token_ids), sequence.reason) == (most, FinishReason.LENGTH)
        return end

    try:
        alone = await ask(0, 0)
        beside = await asyncio.gather(*(ask(i, most) for i, most in enumerate([4, 0, 3, 0, 0, 2])))
        after = await ask(9, 0)
    finally:
        await engine.stop()

    ends = (alone, *beside, after)
    assert [end.source_ids for end in ends] == [(5, 6, 7)] * len(ends)
    assert [end.usage.output_tokens for end in ends] == [0, 4, 0, 3, 0, 0, 2, 0]
    assert alone.timing.steps == 0
