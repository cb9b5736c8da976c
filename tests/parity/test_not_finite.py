"""A request that drives the exported model out of range fails alone; no neighbour notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from threading import Lock

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import EngineFailure
from engine.generation.async_engine import AsyncEngine
from engine.package.manifest import PackageFormat
from engine.package.package import Package, load_package
from engine.requests.events import RequestFinished, SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams, ScoreRequest
from engine.scheduling.output import EngineOutput
from exporter.checkpoint import save_checkpoint
from tests.parity.conftest import (
    CONFIGS,
    CPU,
    CUDA_FP16,
    CUDA_FP32,
    Setup,
    byte_tokenizer,
    export_unproven,
    random_model,
)
from tests.parity.near import NEAR, assert_near

NAN, HUGE = 58, 57  # tokens with such an embedding, which the model never writes
ENGINE = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=12, prefill_chunk_size=4, num_threads=1
)
PROMPT = tuple(range(7, 17))
SOUND = [  # short beside long: what lies behind the end of a row must not be read
    (PROMPT[:1], SamplingParams(max_new_tokens=4, logprobs=2)),
    (PROMPT[:2], SamplingParams("sampling", seed=3, max_new_tokens=3, logprobs=0, num_outputs=2)),
    (PROMPT[:3], SamplingParams("beam", beam_width=3, num_outputs=3, max_new_tokens=4)),
    (PROMPT, SamplingParams("sampling", seed=4, top_k=5, prompt_logprobs=1, max_new_tokens=5)),
]
KINDS = {
    "greedy": SamplingParams(max_new_tokens=5),
    "sampling": SamplingParams("sampling", max_new_tokens=5),
    "best_of": SamplingParams("sampling", best_of=3, max_new_tokens=5),
    "beam": SamplingParams("beam", beam_width=4, max_new_tokens=5),
    "prompt_logprobs": SamplingParams(prompt_logprobs=0, max_new_tokens=5),
}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, PackageFormat], Package]:
    """Make the package of a model with two bad embeddings; no certificate would be given to it."""

    @cache
    def make(name: str, form: PackageFormat) -> Package:
        config = CONFIGS[name].model_copy(update={"tie_output": False, "output_bias": True})
        model = random_model(config).eval()
        with torch.no_grad():
            for part, weight in model.named_parameters():
                if "embedding" in part and weight.shape[0] == config.vocab_size:
                    weight[NAN], weight[HUGE] = torch.nan, 1e38
                elif "output" in part and weight.shape == (config.vocab_size,):
                    weight[[NAN, HUGE]] = -1e30
        path = tmp_path_factory.mktemp(name) / "checkpoint"
        save_checkpoint(path, "tiny", model, byte_tokenizer())
        return load_package(export_unproven(path, form).package)

    return make


async def answer(engine: AsyncEngine, prompt: tuple[int, ...], params: SamplingParams) -> object:
    asked = GenerationRequest("sound", prompt, params)
    events = [event async for event in engine.generate(asked)]
    found = [event for event in events if isinstance(event, SequenceFinished)]
    assert isinstance(events[-1], RequestFinished)
    return sorted(found, key=lambda event: event.index), events[-1].prompt_logprobs


async def fail(engine: AsyncEngine, request: GenerationRequest | ScoreRequest) -> None:
    with pytest.raises(EngineFailure, match=f"^{request.request_id}: .* not finite"):
        if isinstance(request, ScoreRequest):
            await engine.score(request)
        else:
            async for _ in engine.generate(request):
                pass


def bad_requests() -> list[GenerationRequest | ScoreRequest]:
    found: list[GenerationRequest | ScoreRequest] = []
    for kind, params in KINDS.items():
        for bad in (NAN, HUGE):
            for place in (0, 5, 9):  # in the first chunk, in one between, at the end
                prompt = (*PROMPT[:place], bad, *PROMPT[place + 1 :])
                found.append(GenerationRequest(f"{kind}-{bad}-{place}", prompt, params))
            found.append(
                GenerationRequest(f"{kind}-{bad}-prefix", PROMPT, params, target_prefix=(5, bad))
            )
    found.append(ScoreRequest("score-source", (5, NAN, 6), (7, 8)))
    found.append(ScoreRequest("score-target", PROMPT, (7, HUGE, 9, 10, 11, 12, 13, 14)))
    return found


@pytest.mark.parametrize(
    ("name", "setup"),
    [
        pytest.param("gpt", CPU, id="gpt-cpu", marks=pytest.mark.long),
        pytest.param("encoder-decoder", CPU, id="encoder-decoder-cpu"),
        pytest.param("llama", CUDA_FP16, id="llama-cuda-fp16", marks=pytest.mark.long),
        pytest.param("gpt", CUDA_FP32, id="gpt-cuda-fp32", marks=pytest.mark.long),
        pytest.param(
            "encoder-decoder", CUDA_FP32, id="encoder-decoder-cuda-fp32", marks=pytest.mark.long
        ),
        pytest.param(
            "encoder-decoder", CUDA_FP16, id="encoder-decoder-cuda-fp16", marks=pytest.mark.long
        ),
    ],
)
async def test_neighbours_and_later_users_of_a_slot_do_not_notice_logits_that_are_not_finite(
    name: str,
    setup: Setup,
    poisoned: Callable[[str, PackageFormat], Package],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.generation.engine_loop.KEEP_MEMORY", 0.01)  # 42 times in a row
    engine = setup.load(poisoned(name, setup.form), ENGINE)
    at_rest = between_steps(engine)
    await engine.start()

    try:
        alone = [await answer(engine, *sound) for sound in SOUND]
        for request in bad_requests():
            *beside, _ = await asyncio.gather(
                *(answer(engine, *sound) for sound in SOUND), fail(engine, request)
            )
            assert_same(beside, alone, name, setup)
            await come_to_rest(engine)
            with at_rest:  # nothing may be left to do while the last step is running
                assert_is_finite(engine)
            after = await asyncio.gather(*(answer(engine, *sound) for sound in SOUND))
            assert_same(after, alone, name, setup)
        load = engine.load()
    finally:
        await engine.stop()

    assert (load.running, load.waiting) == (0, 0) and load.wasted.failed_tokens > 0


def assert_same(found: object, expected: object, name: str, setup: Setup) -> None:
    if setup.has_equal_bits(name):
        assert found == expected
    else:
        assert_near(found, expected, NEAR[setup.form.precision])


def between_steps(engine: AsyncEngine) -> Lock:
    """Return a lock that every step holds from now on."""
    step, lock = engine._steps._core.step, Lock()

    def locked() -> list[EngineOutput]:
        with lock:
            return step()

    engine._steps._core.step = locked  # type: ignore[method-assign]
    return lock


async def come_to_rest(engine: AsyncEngine) -> None:
    while engine._steps._core.scheduler.has_work or engine._steps.has_commands:
        await asyncio.sleep(0.001)


def assert_is_finite(engine: AsyncEngine) -> None:
    cache = engine._steps._core.runner.model.cache
    assert np.isfinite(cache.rows.memory).all()
    assert cache.sources is None or np.isfinite(cache.sources.memory).all()
