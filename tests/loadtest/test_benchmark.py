"""Benchmarks on a scripted model: what is run and counted; nothing here looks at a clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, PackageError
from engine.generation.core import StepTimes
from engine.package.manifest import GenerationContract
from engine.package.package import Package
from loadtest.benchmark.engine_bench import EngineBench
from loadtest.benchmark.memory import read_memory
from loadtest.benchmark.work import (
    BenchmarkWork,
    cache_bytes,
    check_fits,
    generation_contract,
    random_prompts,
)
from tests.conftest import EOS

MakeEngine = Callable[..., Awaitable[Any]]


def always_eos(source: list[int], tokens: list[int]) -> int:
    return EOS


async def test_every_request_gets_exactly_the_asked_tokens_whatever_the_model_says(
    make_engine: MakeEngine,
) -> None:
    engine, _ = await make_engine(always_eos)
    work = BenchmarkWork(num_prompt_tokens=5, num_new_tokens=3)

    measured = await EngineBench(engine).measure(
        random_prompts(work, 4, 256), lambda index: work.params(index, 3)
    )

    assert [answer.token_ids for answer in measured.answers] == [(EOS, EOS, EOS)] * 4


async def test_requests_are_computed_together(make_engine: MakeEngine) -> None:
    engine, runner = await make_engine(always_eos, config=EngineConfig(max_num_seqs=4))
    work = BenchmarkWork(num_prompt_tokens=5, num_new_tokens=3)
    all_wait = threading.Event()  # the first to come alone would end before the last is there
    runner.before_step = lambda: all_wait.wait(60)

    measuring = asyncio.create_task(
        EngineBench(engine).measure(random_prompts(work, 4, 256), lambda i: work.params(i, 3))
    )
    while engine.load().running + engine.load().waiting < 4:
        await asyncio.sleep(0)
    all_wait.set()
    await measuring

    assert max(len(batch.decode_ids) for batch in runner.batches) == 4


async def test_steps_of_the_work_are_counted_and_those_before_it_are_not(
    make_engine: MakeEngine,
) -> None:
    engine, runner = await make_engine(always_eos)
    work = BenchmarkWork(num_prompt_tokens=5, num_new_tokens=3)
    bench = EngineBench(engine)
    await bench.measure(random_prompts(work, 1, 256), lambda index: work.params(index, 3))
    before = len(runner.batches)

    measured = await bench.measure(
        random_prompts(work, 2, 256), lambda index: work.params(index, 3)
    )

    assert measured.times.steps == len(runner.batches) - before
    assert 0 < measured.times.total <= measured.seconds


def test_prompts_have_the_asked_length_and_are_other_ones_every_time() -> None:
    work = BenchmarkWork(num_prompt_tokens=7, seed=3)

    prompts = random_prompts(work, 4, 11, 0)

    assert [len(prompt) for prompt in prompts] == [7] * 4
    assert all(0 <= token < 11 for prompt in prompts for token in prompt)
    assert prompts == random_prompts(work, 4, 11, 0)
    assert prompts != random_prompts(work, 4, 11, 1)


@pytest.mark.parametrize(
    ("options", "strategy", "top_k", "beam_width"),
    [
        ({}, "greedy", 0, 1),
        ({"strategy": "topk"}, "sampling", 50, 1),
        ({"strategy": "beam", "beam_width": 4}, "beam", 0, 4),
    ],
)
def test_the_strategy_is_asked_of_the_engine(
    options: dict[str, Any], strategy: str, top_k: int, beam_width: int
) -> None:
    params = BenchmarkWork(**options).params(1, 9)

    assert (params.strategy, params.top_k, params.beam_width) == (strategy, top_k, beam_width)
    assert params.max_new_tokens == 9 and params.ignore_eos
    assert params.prompt_logprobs is None


def test_given_tokens_are_scored_where_that_is_asked() -> None:
    assert BenchmarkWork(prompt_logprobs=5).params(1, 9).prompt_logprobs == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompt_tokens": 0}, r"num_prompt_tokens \(0\) must be at least 1"),
        ({"num_new_tokens": 0}, r"num_new_tokens \(0\) must be at least 1"),
        ({"strategy": "beam"}, "a width of 2 or more"),
        ({"beam_width": 4}, "a width of 2 or more"),
    ],
)
def test_impossible_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchmarkWork(**options)


@pytest.mark.parametrize(
    ("shape", "prompt", "new", "message"),
    [
        ({"max_len": 16}, 12, 5, "17, more than the 16 that this model's context holds"),
        ({"max_len": 16, "max_source_len": 8}, 9, 2, "more than 8, the longest source"),
        ({"max_len": 16, "max_source_len": 8}, 8, 16, "more than 15, the longest output"),
        (
            {"max_len": 16, "max_source_len": 8},
            128,
            64,
            "128 .* give --prompt-tokens 8 or less; 64 .* give --new-tokens 15 or less",
        ),
    ],
)
def test_work_beyond_the_model_is_refused_with_its_limit(
    shape: dict[str, int],
    prompt: int,
    new: int,
    message: str,
    make_contract: Callable[..., GenerationContract],
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_fits(BenchmarkWork(prompt, new), make_contract(**shape))


@pytest.mark.parametrize(
    ("shape", "prompt", "new"),
    [({"max_len": 16}, 12, 4), ({"max_len": 9, "max_source_len": 8}, 8, 8)],
)
async def test_work_that_just_fits_is_done(
    shape: dict[str, int], prompt: int, new: int, make_engine: MakeEngine
) -> None:
    engine, _ = await make_engine(always_eos, **shape)
    work = BenchmarkWork(prompt, new)
    check_fits(work, generation_contract(engine.package))

    measured = await EngineBench(engine).measure(
        random_prompts(work, 1, 256), lambda index: work.params(index, new)
    )

    assert len(measured.answers[0].token_ids) == new


def test_a_model_that_does_not_generate_is_refused(make_package: Callable[..., Package]) -> None:
    package = make_package()
    manifest = package.manifest.model_copy(update={"generation": None, "name": "digits"})

    with pytest.raises(PackageError, match="digits does not generate"):
        generation_contract(package.model_copy(update={"manifest": manifest}))


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("fp16", 2), ("bf16", 2), ("int8", 1)])
def test_the_cache_is_counted_in_its_own_type(
    dtype: str, size: int, make_contract: Callable[..., GenerationContract]
) -> None:
    contract = make_contract()
    cache = contract.cache.model_copy(update={"dtype": dtype})

    num_bytes = cache_bytes(BenchmarkWork(5, 4), contract.model_copy(update={"cache": cache}))

    assert num_bytes == 2 * size * (5 + 4 - 1)


def test_times_since_an_earlier_step_are_differences() -> None:
    earlier, later = StepTimes(2, 0.5, 4.0, 1.0), StepTimes(5, 1.0, 10.0, 3.0)

    assert later.since(earlier) == StepTimes(3, 0.5, 6.0, 2.0)
    assert later.total == 14.0


def test_the_peak_of_memory_is_at_least_what_is_used_now() -> None:
    memory = read_memory()

    assert memory.resident is not None and memory.peak is not None
    assert memory.peak >= memory.resident > 1_000_000
