"""Requests that cannot end in time: who is refused, and whether coming back helps.

Time is simulated: a step takes what the test says, and a clock that only the test moves tells it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from engine.config import EngineConfig
from engine.errors import CannotMeet
from engine.generation.core import EngineCore
from engine.requests.request import SamplingParams
from engine.scheduling.estimates import CompletionEstimates
from engine.scheduling.output import FailedOutput, FinishedOutput
from engine.scheduling.sequence import TokenRequest
from engine.slots.batch import ScheduledBatch

STEP, READ = 0.1, 0.01  # seconds of a decode step, and of a prompt token
A = 65


@dataclass
class Simulation:
    """An engine whose steps take time on a fake clock; it keeps when requests ended, and how."""

    core: EngineCore
    runner: object
    clock: Callable[[], float]
    finished: dict[int, float] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start = self.runner.start

        def timed(batch: ScheduledBatch, *of_a_device: object) -> object:
            num_read = sum(len(chunk.token_ids) for chunk in batch.chunks)
            self.clock.now += STEP * bool(batch.decode_ids) + READ * num_read
            return start(batch)

        self.runner.start = timed

    def add(self, key: int, length: int = 3, *, seconds: float | None = None, **params) -> None:
        now = self.clock()
        options = {"ignore_eos": True, "max_new_tokens": 10} | params
        self.core.scheduler.add(
            TokenRequest(
                key,
                f"request-{key}",
                tuple(range(length)),
                SamplingParams(**options),
                0,
                now,
                None if seconds is None else now + seconds,
            )
        )

    def run(self, until: float = float("inf")) -> None:
        while self.clock() < until and self.core.scheduler.has_work:
            for output in self.core.step():
                if isinstance(output, FinishedOutput):
                    self.finished[output.key] = self.clock()
                if isinstance(output, FailedOutput):
                    self.failed[output.key] = output.error
        self.clock.now = max(self.clock.now, until) if until != float("inf") else self.clock.now


@pytest.fixture
def simulate(make_core: Callable, clock: Callable[[], float]) -> Callable[..., Simulation]:
    def make(num_slots: int = 2, **options: int) -> Simulation:
        settings = {"prefill_chunk_size": 8, "reuse_prefixes": False} | options
        config = EngineConfig(max_num_seqs=num_slots, **settings)
        core, runner = make_core(lambda source, tokens: A, config=config, max_len=512)
        return Simulation(core, runner, clock)

    return make


def test_nobody_is_refused_before_anything_was_measured(simulate) -> None:
    engine = simulate()
    for key in range(40):
        engine.add(key)

    engine.add(99, length=400, seconds=0.001, max_new_tokens=100)

    assert engine.core.scheduler.load().waiting == 39


def test_a_deadline_too_short_for_the_tokens_it_must_make_is_refused_for_good(simulate) -> None:
    engine = simulate()
    engine.add(1, max_new_tokens=5)
    engine.run()

    with pytest.raises(CannotMeet, match="even with nothing waiting, and its deadline") as refused:
        engine.add(2, seconds=2.0, max_new_tokens=30)

    assert refused.value.retry_after is None


@pytest.mark.parametrize(
    "params",
    [
        {"ignore_eos": False, "max_new_tokens": 30},
        {"ignore_eos": True, "max_new_tokens": 30, "stop_strings": ("x",)},
        {"ignore_eos": True, "max_new_tokens": 30, "allow_partial": True},
    ],
)
def test_tokens_that_a_request_may_not_need_do_not_count(simulate, params: dict) -> None:
    engine = simulate()
    engine.add(1, max_new_tokens=5)
    engine.run()

    engine.add(2, seconds=2.0, **params)

    assert engine.core.scheduler.load().running == 1


def test_tokens_that_have_no_room_behind_the_prompt_do_not_count(simulate) -> None:
    engine = simulate()
    engine.add(1, max_new_tokens=5)
    engine.run()
    room = {"ignore_eos": False, "max_new_tokens": None, "min_new_tokens": 500}

    engine.add(2, length=508, seconds=2.0 + 508 * READ, **room)

    assert engine.core.scheduler.load().running == 1


def test_a_long_prompt_that_cannot_be_read_in_time_is_refused(simulate) -> None:
    engine = simulate()
    engine.add(1, length=64, max_new_tokens=1)
    engine.run()

    with pytest.raises(CannotMeet):
        engine.add(2, length=400, seconds=3.9, max_new_tokens=1)
    engine.add(3, length=400, seconds=4.1, max_new_tokens=1)
    engine.run()

    assert 3 in engine.finished


@pytest.mark.parametrize("num_slots", [1, 2, 5])
@pytest.mark.parametrize("backlog", [25, 40])
@pytest.mark.parametrize("seconds", [1.5, 2.5])
def test_who_is_refused_and_comes_back_when_told_is_taken_and_meets_the_same_deadline(
    simulate, num_slots: int, backlog: int, seconds: float
) -> None:
    engine = simulate(num_slots)
    for key in range(backlog + 10 * num_slots):
        engine.add(key)
    engine.run(until=engine.clock() + 11.3)

    with pytest.raises(CannotMeet, match="would wait about .* retry in") as refused:
        engine.add(1000, seconds=seconds)
    told = engine.clock() + refused.value.retry_after
    engine.run(until=told)
    engine.add(1001, seconds=seconds)
    engine.run()

    assert engine.failed == {}
    assert engine.finished[1001] <= told + seconds + STEP


@pytest.mark.parametrize("seed", range(8))
def test_nobody_is_refused_who_would_have_met_the_deadline(simulate, seed: int) -> None:
    """Random lengths, arrivals and deadlines; each refusal is held against a run without it."""
    draw = random.Random(seed)
    engine = simulate(draw.choice([1, 2, 4]))
    deadlines: dict[int, float] = {}
    refused: set[int] = set()
    for key in range(150):
        seconds = draw.uniform(0.2, 12.0)
        options = {"length": draw.randint(1, 40), "max_new_tokens": draw.randint(1, 20)}
        deadlines[key] = engine.clock() + seconds
        try:
            engine.add(key, seconds=seconds, **options)
            engine.core.scheduler.abort(key)
        except CannotMeet:
            refused.add(key)
        engine.add(key, **options)  # without a deadline, to see when it ends
        engine.run(until=engine.clock() + draw.expovariate(1.5))
    engine.run()

    assert refused, "nothing was tried"
    assert [key for key in sorted(refused) if engine.finished[key] <= deadlines[key]] == []


def test_time_without_a_queue_does_not_make_the_queue_look_slow(simulate, clock) -> None:
    engine = simulate(1)
    for key in range(8):
        engine.add(key)
    engine.run()
    clock.now += 3600
    for key in range(10, 13):
        engine.add(key)

    engine.add(14, seconds=6.0)
    engine.run()

    assert engine.failed == {} and 14 in engine.finished


def test_what_need_not_be_read_again_does_not_count(simulate) -> None:
    engine = simulate(reuse_prefixes=True)
    engine.add(1, length=64, max_new_tokens=1)
    engine.run()

    with pytest.raises(CannotMeet):
        engine.add(2, length=400, seconds=3.3, max_new_tokens=1)
    engine.add(3, length=400, seconds=3.5, max_new_tokens=1)
    engine.run()

    assert 3 in engine.finished


def test_a_few_prompt_tokens_tell_nothing_of_a_long_prompt() -> None:
    estimates = CompletionEstimates(max_num_seqs=2, chunk_size=128)
    estimates.took_step(0.05, 100.0, num_decoding=0, num_read=4)

    refusal = estimates.refusal(time_left=1.0, num_read=400, num_new=1, num_to_end=0)

    assert refusal is None


def test_a_step_without_a_model_is_no_measurement() -> None:
    estimates = CompletionEstimates(max_num_seqs=2, chunk_size=128)
    estimates.took_step(0.05, 100.0, num_decoding=2, num_read=0)
    estimates.took_step(0.0, 101.0, num_decoding=0, num_read=0)

    refusal = estimates.refusal(time_left=1.0, num_read=4, num_new=100, num_to_end=0)

    assert refusal is not None and refusal.retry_after is None
