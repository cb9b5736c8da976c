"""Hundreds of random requests at once: each gets what it gets alone, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import DeadlineExpired
from engine.generation.async_engine import AsyncEngine
from engine.generation.request_stream import RequestStream
from engine.package.manifest import CacheDtype, PackageFormat, Weights
from engine.requests.events import FinishReason, RequestFinished, Score, SequenceFinished, TextDelta
from engine.requests.request import (
    Constraint,
    GenerationRequest,
    LogitControls,
    SamplingParams,
    ScoreRequest,
)
from engine.sampling.beam_search import BeamSearch
from engine.scheduling.output import EngineOutput
from engine.scheduling.sequence import Request, Sequence
from engine.text.constraint import ConstraintMatcher
from tests.parity.conftest import (
    CONFIGS,
    CPU,
    CUDA_FP16,
    CUDA_FP32,
    FAKE_FP16,
    FAKE_FP32,
    GPU_FP16,
    GPU_FP32,
    VOCAB_SIZE,
    Exported,
    Setup,
)
from tests.parity.near import NEAR, assert_near

NUM_REQUESTS, NUM_REQUESTS_LONG = 200, 1_000
SECONDS_A_REQUEST = 0.0016  # in which they arrive
ENGINE = EngineConfig(
    max_num_seqs=8,
    max_num_batched_tokens=16,
    prefill_chunk_size=4,
    max_queue_size=NUM_REQUESTS_LONG,
    num_threads=1,
)
CONSTRAINTS = [
    Constraint("choice", ("yes", "no", "maybe")),
    Constraint("regex", ("[0-9]{2}:[0-9]{2}",)),
    Constraint("json_schema", ('{"enum": [12, 7, "x"]}',)),
]
Ask = GenerationRequest | ScoreRequest
Answer = tuple[SequenceFinished, ...] | Any


@dataclass(frozen=True)
class Plan:
    """A request, when it comes and what becomes of it."""

    request: Ask
    arrival: float  # seconds
    steps_allowed: float | None  # its deadline
    leaves_after: float | None  # seconds
    leaves_at_event: int | None


class RandomRequests:
    """Makes requests of every kind for a model."""

    def __init__(self, name: str, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        config = CONFIGS[name]
        self._has_source = name == "encoder-decoder"
        self._max_target = config.max_target_len - 1 - self._has_source
        self._max_prompt = config.max_source_len if self._has_source else self._max_target
        self._beginnings = [self._ids(self._max_prompt) for _ in range(6)]

    def plans(self, count: int) -> list[Plan]:
        return [self._plan(number, SECONDS_A_REQUEST * count) for number in range(count)]

    def _plan(self, number: int, arrivals: float) -> Plan:
        rng = self._rng
        what_happens = number % 10  # two of ten leave, one has little time
        leaves = self._choose(None, float(rng.exponential(0.05))) if what_happens < 2 else None
        return Plan(
            self._request(f"request-{number}"),
            float(rng.uniform(0, arrivals)),
            float(2 ** rng.integers(0, 9)) if what_happens == 2 else None,
            leaves,
            int(rng.integers(1, 4)) if what_happens < 2 and leaves is None else None,
        )

    def _request(self, request_id: str) -> Ask:
        prompt, priority = self._prompt(), int(self._rng.integers(0, 3))
        tenant = f"tenant-{self._rng.integers(0, 4)}"
        room = self._max_target - (0 if self._has_source else len(prompt))
        if room > 0 and self._happens(0.15):
            target, top = self._ids(self._count(1, min(room, 9))), self._count(0, 3)
            return ScoreRequest(request_id, prompt, target, top, priority, tenant)
        params = self._params()
        prefix: tuple[int, ...] = ()
        if room > 0 and params.constraint is None and self._happens(0.2):
            prefix = self._ids(self._count(1, min(room, 6)))
        return GenerationRequest(
            request_id, prompt, params, target_prefix=prefix, priority=priority, tenant=tenant
        )

    def _params(self) -> SamplingParams:
        max_new = self._count(1, 12)
        constraint = self._choose(*CONSTRAINTS) if self._happens(0.1) else None
        strategy = self._choose("greedy", "sampling", "sampling", "beam")
        outputs = 1 if strategy == "greedy" else self._count(1, 3)
        has_stop_strings = self._happens(0.2)
        return SamplingParams(
            strategy=strategy,
            **(self._sampling(outputs) if strategy == "sampling" else {}),
            **(self._beam(outputs) if strategy == "beam" else {}),
            num_outputs=outputs,
            forced_begin=self._ids(1) if constraint is None and self._happens(0.2) else (),
            forced_end=self._choose(None, None, None, 5),
            controls=self._controls() if self._happens(0.4) else LogitControls(),
            constraint=constraint,
            logprobs=self._choose(0, 1, 5) if self._happens(0.3) else None,
            prompt_logprobs=self._choose(0, 3) if self._happens(0.2) else None,
            alignment=self._has_source and self._happens(0.3),
            allow_partial=self._happens(0.3),
            max_new_tokens=max_new,
            min_new_tokens=self._count(0, min(3, max_new)),
            stop_strings=("a", "7x", "(b", "zz") if has_stop_strings else (),
            stop_token_ids=self._ids(self._count(1, 3)) if self._happens(0.3) else (),
            include_stop=self._happens(0.3),
            ignore_eos=constraint is None and self._happens(0.2),
        )

    def _sampling(self, outputs: int) -> dict[str, Any]:
        return {
            "temperature": self._choose(0.3, 1.0, 1.7),
            "top_k": self._choose(0, 1, 5, 30),
            "top_p": self._choose(1.0, 0.9, 0.5),
            "min_p": self._choose(0.0, 0.0, 0.1),
            "typical_p": self._choose(1.0, 1.0, 0.8),
            "seed": int(self._rng.integers(0, 2**63)),
            "best_of": self._choose(None, None, outputs + 2),
        }

    def _beam(self, outputs: int) -> dict[str, Any]:
        return {
            "beam_width": max(outputs, self._choose(1, 2, 4, 5, 8)),
            "length_penalty": self._choose(None, 0.0, 0.6, 2.0, -0.5),
            "length_penalty_form": self._choose(None, "power", "paper"),
            "beam_end": self._choose("bound", "bound", "limit", "enough", "estimate"),
            "renormalize": self._choose(False, False, True),
        }

    def _controls(self) -> LogitControls:
        biases = tuple((token_id, self._choose(-3.0, 4.0)) for token_id in self._ids(2))
        return LogitControls(
            repetition_penalty=self._choose(1.0, 1.3, 0.8),
            frequency_penalty=self._choose(0.0, 0.5, -0.5),
            presence_penalty=self._choose(0.0, 0.7),
            no_repeat_ngram=self._choose(0, 1, 2, 3),
            logit_bias=biases if self._happens(0.5) else (),
            banned_tokens=self._ids(3) if self._happens(0.5) else (),
            banned_sequences=tuple(self._ids(2) for _ in range(8)) if self._happens(0.3) else (),
            begin_banned_tokens=self._ids(2) if self._happens(0.3) else (),
            encoder_no_repeat_ngram=self._choose(0, 0, 2),
        )

    def _prompt(self) -> tuple[int, ...]:
        length = self._count(1, self._max_prompt)
        if self._happens(0.5):
            return self._ids(length)
        beginning: tuple[int, ...] = self._choose(*self._beginnings)
        num_shared = self._count(1, length)
        return beginning[:num_shared] + self._ids(length - num_shared)

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(3, VOCAB_SIZE, count).tolist())

    def _count(self, least: int, most: int) -> int:
        return int(self._rng.integers(least, most + 1))

    def _happens(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def _choose(self, *values: Any) -> Any:
        return values[self._rng.integers(0, len(values))]


class FedRequests(RandomRequests):
    """Makes requests that a device feeds itself, and a few of every other kind."""

    def _request(self, request_id: str) -> Ask:
        if self._happens(0.05):
            return super()._request(request_id)
        params = self._choose(SamplingParams(), SamplingParams("sampling", **self._truncation()))
        length = {"max_new_tokens": self._count(1, 14), "ignore_eos": self._happens(0.3)}
        return GenerationRequest(request_id, self._prompt(), replace(params, **length))

    def _truncation(self) -> dict[str, Any]:
        return {
            "temperature": self._choose(0.3, 1.0, 1.7),
            "top_k": self._choose(0, 1, 5, 30, VOCAB_SIZE),
            "top_p": self._choose(1.0, 0.9, 0.5),
            "min_p": self._choose(0.0, 0.1),
            "seed": int(self._rng.integers(0, 2**63)),
            "num_outputs": self._choose(1, 1, 1, 2),
        }


class Watch:
    """Counts an engine's steps, which are its clock, and sees what runs in each."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine, self.core = engine, engine._steps._core
        self.scheduler, self.runner = self.core.scheduler, self.core.runner.model
        self.num_steps = 0
        self.is_in_step = False
        self.closed_in: dict[int, int] = {}  # requests without a reader: the step in flight then
        self.too_late: list[str] = []
        self._step, self._close = self.core.step, engine._close
        engine._clock = self.scheduler._clock = lambda: float(self.num_steps)
        engine._close = self._watch_close
        self.core.step = self._watch_step

    def _watch_close(self, key: int, stream: RequestStream) -> None:
        is_cancelled = not stream.has_ended
        self._close(key, stream)
        if is_cancelled:
            self.closed_in[key] = self.num_steps

    def _watch_step(self) -> list[EngineOutput]:
        self.num_steps += 1
        for key, step in self.closed_in.copy().items():  # a copy is one step of the interpreter
            # The next step may have been chosen when the reader went away, the one after it not.
            is_there = key in self.scheduler._running or key in self.scheduler._waiting
            if is_there and self.num_steps >= step + 2:
                self.too_late.append(f"{key} closed in step {step}, there in {self.num_steps}")
        self.is_in_step = True
        try:
            return self._step()
        finally:
            self.is_in_step = False

    async def come_to_rest(self) -> None:
        engine = self.engine
        while self.scheduler.has_work or self.is_in_step or engine._steps.has_commands:
            await asyncio.sleep(0.001)


async def answer(engine: AsyncEngine, request: Ask, leaves_at_event: int | None = None) -> Answer:
    """Return all of an answer that does not depend on when and beside whom it was computed."""
    if isinstance(request, ScoreRequest):
        score = await engine.score(request)
        return Score, score.sum_logprob, score.positions
    events = []
    async with aclosing(engine.generate(request)) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == leaves_at_event:
                return None
    found = sorted((e for e in events if isinstance(e, SequenceFinished)), key=lambda e: e.index)
    for sequence in found:
        deltas = [e for e in events if isinstance(e, TextDelta) and e.index == sequence.index]
        assert bool(deltas) <= sequence.was_streamed
        if sequence.was_streamed:
            assert "".join(delta.text for delta in deltas) == sequence.text
            assert sum((delta.token_ids for delta in deltas), ()) == sequence.token_ids
    end = events[-1]
    assert isinstance(end, RequestFinished)
    return tuple(found), end.prompt_logprobs, end.seed, end.usage.output_tokens


async def under_load(
    engine: AsyncEngine, plans: list[Plan], deadline_in: Callable[[float], float]
) -> list[Answer | Literal["late", "left"]]:
    """Send everything when it is due; `deadline_in` is asked for the end of so many steps."""

    async def send(plan: Plan) -> Answer:
        await asyncio.sleep(plan.arrival)
        try:
            return await send_now(plan) or "left"
        except DeadlineExpired:  # which holds on to the frames that it came through
            return "late"

    async def send_now(plan: Plan) -> Answer | None:
        request = plan.request
        if plan.steps_allowed is not None:
            request = replace(request, deadline=deadline_in(plan.steps_allowed))
        asked = answer(engine, request, plan.leaves_at_event)
        if plan.leaves_after is None:
            return await asked
        task = asyncio.create_task(asked)
        await asyncio.wait([task], timeout=plan.leaves_after)
        task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return None

    return await asyncio.gather(*map(send, plans))


def is_cut(found: Answer) -> bool:
    """Say whether it is a part only: its time was over, and it asked for what there is."""
    sequences = found[0] if found[0] is not Score else ()
    return any(sequence.reason is FinishReason.DEADLINE for sequence in sequences)


def assert_is_part(found: Answer, whole: Answer) -> None:
    for cut in found[0]:
        if cut.was_streamed:  # the best of some beams or samples may be others in the end
            assert whole[0][cut.index].token_ids[: len(cut.token_ids)] == cut.token_ids


def assert_nothing_is_left(watch: Watch) -> None:
    load, cache = watch.engine.load(), watch.runner.cache
    assert (load.running, load.waiting, load.waiting_tokens, load.cache_used) == (0, 0, 0, 0.0)
    assert not watch.engine._streams
    watch.core.check_integrity()  # so rows hold what was kept, and nothing else
    for memory in filter(None, (cache.rows, cache.sources)):
        num_rows, _, length, _ = memory.layers[0].key.shape
        assert all(np.isfinite(memory.read(row, length)).all() for row in range(num_rows))


def assert_equal_answers(
    plans: list[Plan], answers: list[Any], alone: list[Answer], setup: Setup, name: str
) -> None:
    outcomes = Counter()
    for plan, found, expected in zip(plans, answers, alone, strict=True):
        if found == "left":
            assert plan.leaves_after is not None or plan.leaves_at_event is not None
            outcomes[found] += 1
        elif found == "late":
            assert plan.steps_allowed is not None
            outcomes[found] += 1
        elif is_cut(found):
            assert_is_part(found, expected)
            outcomes["cut"] += 1
        else:
            if setup.has_equal_bits(name):
                assert found == expected, plan.request
            else:
                assert_near(found, expected, NEAR[setup.form.precision])
            outcomes["whole"] += 1
    assert sum(outcomes.values()) == len(plans)
    assert all(outcomes[outcome] for outcome in ("whole", "left", "late")), "it tried nothing"


def objects_of(*types: type) -> dict[type, int]:
    gc.collect()
    found = [type(o) for o in gc.get_objects() if type(o) in types]
    return {kind: found.count(kind) for kind in types}


def rounded(weights: Weights, kv_cache: CacheDtype = "fp16") -> Setup:
    return Setup(PackageFormat.of("cuda", "fp16", weights, kv_cache), has_bucket=True)


LONG = {
    ("gpt", "cpu"): CPU,
    ("gpt", "cpu with a bucket"): CPU._replace(has_bucket=True),
    ("encoder-decoder", "cpu with a bucket"): CPU._replace(has_bucket=True),
    ("gpt", "cuda-fp32"): CUDA_FP32,
    ("llama", "cuda-fp32"): CUDA_FP32,
    ("gpt", "cuda-fp16"): CUDA_FP16,
    ("gpt", "cuda-fp32 without a bucket"): CUDA_FP32._replace(has_bucket=False),
    ("encoder-decoder", "cuda-fp32 without a bucket"): CUDA_FP32._replace(has_bucket=False),
    ("encoder-decoder", "cuda-fp16 without a bucket"): CUDA_FP16._replace(has_bucket=False),
    ("gpt", "cuda-int8-blocks"): rounded("int8-blocks"),
    ("llama", "cuda-int4"): rounded("int4"),
    ("llama-wide", "cuda-int8-cache"): rounded("fp16", "int8"),
    ("encoder-decoder", "cuda-int8-blocks"): rounded("int8-blocks"),
    ("encoder-decoder", "cuda-int4"): rounded("int4"),
    ("encoder-decoder", "cuda-fp16"): CUDA_FP16,
    ("encoder-decoder", "cuda-fp32"): CUDA_FP32,
}
QUICK = {
    ("encoder-decoder", "cpu"): CPU,
    ("encoder-decoder", "fake-gpu-fp32"): FAKE_FP32,
    ("llama", "cuda-fp16"): CUDA_FP16,
}


LONG_MARKS = (pytest.mark.long,)
ON_GPU, ON_FAKE = (
    {
        (name, f"{where}-{precision}"): setup
        for name in ("gpt", "llama", "encoder-decoder")
        for precision, setup in (("fp32", in_fp32), ("fp16", in_fp16))
    }
    for where, in_fp32, in_fp16 in (
        ("gpu", GPU_FP32, GPU_FP16),
        ("fake-gpu", FAKE_FP32, FAKE_FP16),
    )
)


def cases() -> list[Any]:
    fed = {(name, f"{how}, fed"): setup for (name, how), setup in ON_FAKE.items()}
    return [
        pytest.param(name, setup, kind, count, id=f"{name}-{how}", marks=marks)
        for setups, kind, count, marks in (
            (QUICK, RandomRequests, NUM_REQUESTS, ()),
            (LONG, RandomRequests, NUM_REQUESTS_LONG, (*LONG_MARKS, pytest.mark.timeout(900))),
            (ON_FAKE, RandomRequests, NUM_REQUESTS, LONG_MARKS),
            (fed, FedRequests, NUM_REQUESTS_LONG, LONG_MARKS),
            (ON_GPU, RandomRequests, NUM_REQUESTS_LONG, pytest.mark.gpu),
        )
        for (name, how), setup in setups.items()
        if setups is not ON_FAKE or (name, how) not in QUICK
    ]


@pytest.mark.parametrize(("name", "setup", "kind", "num_requests"), cases())
async def test_every_request_under_random_load_gets_what_it_gets_alone(
    name: str,
    setup: Setup,
    kind: type[RandomRequests],
    num_requests: int,
    exported: Callable[..., Exported],
) -> None:
    package = exported(name, setup.form).package
    plans = kind(name, seed=5).plans(num_requests)
    engine = setup.load(package, ENGINE)
    lonely = setup.in_turn.load(package, replace(ENGINE, reuse_prefixes=False))
    watch = Watch(engine)
    await engine.start()
    await lonely.start()
    before = objects_of(Request, Sequence, RequestStream, BeamSearch)

    try:
        answers = await under_load(engine, plans, lambda steps: watch.num_steps + steps)
        await watch.come_to_rest()
        assert_nothing_is_left(watch)
        alone = [await answer(lonely, plan.request) for plan in plans]
    finally:
        await engine.stop()
        await lonely.stop()

    assert_equal_answers(plans, answers, alone, setup, name)
    assert watch.too_late == []
    assert objects_of(Request, Sequence, RequestStream, BeamSearch) == before
    matchers = objects_of(ConstraintMatcher)[ConstraintMatcher]
    asked = [getattr(plan.request, "params", None) for plan in plans]
    constraints = {params.constraint for params in asked if params and params.constraint}
    assert matchers == 2 * len(constraints), "only those that are compiled once, in each engine"


@pytest.mark.parametrize("name", ["gpt", pytest.param("encoder-decoder", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "num_requests",
    [
        NUM_REQUESTS,
        pytest.param(NUM_REQUESTS_LONG, marks=(pytest.mark.long, pytest.mark.timeout(900))),
    ],
)
async def test_every_request_to_a_process_of_its_own_gets_what_it_gets_alone_in_a_thread(
    name: str, num_requests: int, exported: Callable[..., Exported]
) -> None:
    package = exported(name, CPU.form).package
    plans = RandomRequests(name, seed=6).plans(num_requests)
    engine = CPU._replace(own_process=True).load(package, ENGINE)
    lonely = CPU.load(package, replace(ENGINE, reuse_prefixes=False))
    await engine.start()
    await lonely.start()

    try:
        answers = await under_load(engine, plans, lambda steps: time.monotonic() + steps / 1000)
        async with asyncio.timeout(60):
            while engine.load().running:
                await asyncio.sleep(0.01)
        alone = [await answer(lonely, plan.request) for plan in plans]
        load = engine.load()
    finally:
        await engine.stop()
        await lonely.stop()

    assert_equal_answers(plans, answers, alone, CPU, name)
    assert (load.waiting, load.waiting_tokens, load.cache_used) == (0, 0, 0.0)
    assert not engine._streams
