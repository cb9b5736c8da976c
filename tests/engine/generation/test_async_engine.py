"""AsyncEngine on a scripted model: text streams, stops, cancels, deadlines, failures, drain."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import (
    CannotMeet,
    Draining,
    EngineFailure,
    ExpiredInDecode,
    ExpiredInQueue,
    InvalidRequest,
    PackageError,
    QueueFull,
    ReplicaLost,
    Starting,
)
from engine.factory import core_on_slots
from engine.generation.async_engine import AsyncEngine
from engine.generation.core import EngineCore
from engine.lifecycle.lifecycle import WarmUpResult
from engine.requests.events import (
    Admitted,
    FinishReason,
    GenerationEvent,
    RequestFinished,
    SequenceFinished,
    TextDelta,
)
from engine.requests.request import Deltas, GenerationRequest, SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import TokenRequest
from engine.text.constraint import ConstraintCompiler
from engine.text.tokenizer import SourceAndTarget
from tests.engine.watching import fail_once
from tests.fakes.clock import FakeClock

EOS = 257
MakeEngine = Callable[..., Awaitable[tuple[AsyncEngine, object]]]


def request(prompt: str | tuple[int, ...] = "say>", **options) -> GenerationRequest:
    deadline = options.pop("deadline", None)
    request_id = options.pop("request_id", "r-1")
    return GenerationRequest(request_id, prompt, SamplingParams(**options), deadline)


async def collect(engine: AsyncEngine, asked: GenerationRequest) -> list[GenerationEvent]:
    return [event async for event in engine.generate(asked)]


def ended(events: list[GenerationEvent]) -> list[SequenceFinished]:
    return [event for event in events if isinstance(event, SequenceFinished)]


def streamed(events: list[GenerationEvent], index: int = 0) -> tuple[str, tuple[int, ...]]:
    deltas = [e for e in events if isinstance(e, TextDelta) and e.index == index]
    ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
    return "".join(delta.text for delta in deltas), ids


class Gate:
    """Lets a scripted model make one step at a time, or as many as it likes."""

    def __init__(self, runner: object) -> None:
        self._steps = threading.Semaphore(0)
        self.reached = threading.Semaphore(0)
        self.is_open = False
        runner.before_step = self._wait

    def _wait(self) -> None:
        self.reached.release()
        if not self.is_open:
            assert self._steps.acquire(timeout=60)

    async def step(self, count: int = 1) -> None:
        """Let steps begin; return when they have, the last one perhaps still running."""
        for _ in range(count):
            await asyncio.to_thread(self.reached.acquire, timeout=60)
            self._steps.release()

    def open(self) -> None:
        self.is_open = True
        self._steps.release()


# Events


async def test_events_come_in_order_and_tell_everything(make_engine: MakeEngine, spell) -> None:
    engine, _ = await make_engine(spell("a date"))

    events = await collect(engine, request())

    assert events[0] == Admitted("r-1", 4)
    assert all(isinstance(event, TextDelta) for event in events[1:-2])
    (end,) = ended(events)
    assert (end.reason, end.text, end.matched_stop) == (FinishReason.EOS, "a date", None)
    assert end.token_ids == (*b"a date", EOS)
    assert streamed(events) == (end.text, end.token_ids)
    assert end.sum_logprob < 0
    last = events[-1]
    assert isinstance(last, RequestFinished)
    assert (last.usage.input_tokens, last.usage.output_tokens) == (4, 7)
    assert last.timing.steps == 7
    assert last.seed == 0


async def test_the_first_event_comes_before_the_first_token(make_engine: MakeEngine, spell) -> None:
    engine, runner = await make_engine(spell("x"))
    gate = Gate(runner)
    stream = engine.generate(request())

    first = await anext(stream)
    gate.open()

    assert first == Admitted("r-1", 4)
    await stream.aclose()


async def test_token_ids_in_are_used_as_they_are(make_engine: MakeEngine, spell) -> None:
    engine, runner = await make_engine(spell("ok"))

    events = await collect(engine, request(tuple(b"as is>")))

    assert ended(events)[0].text == "ok"
    assert runner.batches[0].chunks[0].token_ids == tuple(b"as is>")


async def test_an_encoder_decoder_reads_the_source_and_writes_the_target(
    make_engine: MakeEngine,
) -> None:
    def shout(source: list[int], tokens: list[int]) -> int:
        return [*bytes(source).upper(), EOS][len(tokens) - 1]

    engine, _ = await make_engine(shout, max_source_len=32)

    answers = await asyncio.gather(*(collect(engine, request(f"source {n}")) for n in range(9)))

    assert [ended(events)[0].text for events in answers] == [f"SOURCE {n}" for n in range(9)]


async def test_text_is_streamed_in_whole_characters(make_engine: MakeEngine, spell) -> None:
    engine, runner = await make_engine(spell("né 日本 😀"))
    gate = Gate(runner)
    stream = engine.generate(request())
    texts = []

    async def read() -> None:
        async for event in stream:
            if isinstance(event, TextDelta):
                texts.append(event.text)

    reader = asyncio.create_task(read())
    for character in "né 日本 😀":
        before = len(texts)
        await gate.step(len(character.encode()))
        while len(texts) == before:
            await asyncio.sleep(0)
    gate.open()
    await reader

    assert texts == [*"né 日本 😀", ""]  # the end is a token, too


async def test_a_character_cut_off_by_the_limit_ends_as_a_replacement(
    make_engine: MakeEngine, spell
) -> None:
    engine, _ = await make_engine(spell("日本"))

    events = await collect(engine, request(max_new_tokens=4))

    (end,) = ended(events)
    assert (end.text, end.reason) == ("日\ufffd", FinishReason.LENGTH)
    assert streamed(events) == (end.text, end.token_ids)


async def test_a_slow_reader_gets_more_text_at_a_time(make_engine: MakeEngine, spell) -> None:
    engine, _ = await make_engine(spell("twenty characters.."))
    stream = engine.generate(request())
    await anext(stream)
    await collect(engine, request())  # begins later and takes as long: the first has ended, too

    events = [event async for event in stream]

    # Text that came together with Admitted, and all the rest at once.
    assert len([event for event in events if isinstance(event, TextDelta)]) <= 2
    assert ended(events)[0].text == "twenty characters.."


async def test_the_loop_lets_an_engine_go_on_soon_whose_device_would_wait(
    make_engine: MakeEngine, spell, monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals: list[float] = []
    monkeypatch.setattr("sys.setswitchinterval", intervals.append)

    in_turn, _ = await make_engine(spell("x"))
    await collect(in_turn, request())
    monkeypatch.setattr(EngineCore, "runs_ahead", True)
    ahead, _ = await make_engine(spell("x"))

    assert ended(await collect(ahead, request()))[0].text == "x"
    assert len(intervals) == 1 and intervals[0] < 0.001


async def test_tokens_come_together_as_the_request_asks(make_engine: MakeEngine, spell) -> None:
    engine, _ = await make_engine(spell("ten tokens"))

    parts = await collect(engine, replace(request(), deltas=Deltas(4)))
    whole = await collect(engine, replace(request(), deltas=None))

    sizes = [len(event.token_ids) for event in parts if isinstance(event, TextDelta)]
    assert sum(sizes) == 11 and min([4, *sizes[:-1]]) == 4  # those of a slow reader have more
    assert streamed(parts) == ("ten tokens", ended(whole)[0].token_ids)
    assert not [event for event in whole if isinstance(event, TextDelta)]
    assert ended(whole)[0].text == "ten tokens"
    assert ended(whole)[0].sum_logprob == ended(parts)[0].sum_logprob


# Stops


async def test_a_stop_string_over_token_borders_ends_the_text_before_it(
    make_engine: MakeEngine, spell
) -> None:
    engine, _ = await make_engine(spell("one STtwo STOP three"))

    events = await collect(engine, request(stop_strings=("STOP", "zzz")))

    (end,) = ended(events)
    assert (end.reason, end.matched_stop, end.text) == (FinishReason.STOP, "STOP", "one STtwo ")
    assert streamed(events) == (end.text, end.token_ids)
    assert end.token_ids == tuple(b"one STtwo STOP")


@pytest.mark.parametrize("deltas", [Deltas(), Deltas(8), Deltas(1, 3600.0), None])
async def test_a_stop_string_ends_the_work_at_once(make_engine: MakeEngine, spell, deltas) -> None:
    engine, runner = await make_engine(spell("ab" + "x" * 50))

    events = await collect(engine, replace(request(stop_strings=("ab",)), deltas=deltas))

    usage = events[-1].usage
    made = sum(len(batch.decode_ids) + len(batch.chunks) for batch in runner.batches)
    assert (usage.output_tokens, usage.discarded_tokens, made) == (2, 0, 2)


async def test_a_stop_can_be_kept(make_engine: MakeEngine, spell) -> None:
    engine, _ = await make_engine(spell("one, two"))

    by_text = await collect(engine, request(stop_strings=(",",), include_stop=True))
    by_token = await collect(engine, request(stop_token_ids=(ord(","),), include_stop=True))
    without = await collect(engine, request(stop_token_ids=(ord(","),)))

    assert [ended(events)[0].text for events in (by_text, by_token, without)] == [
        "one,",
        "one,",
        "one",
    ]
    assert ended(without)[0].matched_stop == ord(",")


async def test_a_stop_string_on_one_sequence_leaves_the_others(make_engine: MakeEngine) -> None:
    def script(source: list[int], tokens: list[int]) -> np.ndarray:
        """The first token is a or b by chance; then it is repeated."""
        logits = np.full(258, -20.0, np.float32)
        if tokens[-1] == ord(">"):
            logits[[ord("a"), ord("b")]] = 5.0
        else:
            logits[tokens[-1]] = 5.0
        return logits

    engine, _ = await make_engine(script)

    events = await collect(
        engine,
        request(
            strategy="sampling",
            seed=1,
            num_outputs=4,
            stop_strings=("aaa",),
            max_new_tokens=10,
        ),
    )

    ends = {(end.text, end.reason) for end in ended(events)}
    assert ends == {("", FinishReason.STOP), ("b" * 10, FinishReason.LENGTH)}
    assert len(ended(events)) == 4
    assert isinstance(events[-1], RequestFinished)


async def test_stops_wait_for_min_new_tokens(make_engine: MakeEngine, spell) -> None:
    engine, _ = await make_engine(spell("a,b,c,d"))

    events = await collect(engine, request(stop_strings=(",",), min_new_tokens=4))

    assert ended(events)[0].text == "a,b"


# Sampling


async def test_a_seed_replays_a_request_whatever_runs_with_it(make_engine: MakeEngine) -> None:
    def script(source: list[int], tokens: list[int]) -> np.ndarray:
        seed = sum(tokens) * 31 + len(tokens)
        return np.random.default_rng(seed).normal(0, 1, 258).astype(np.float32)

    engine, _ = await make_engine(script)
    asked = request(strategy="sampling", seed=42, num_outputs=2, max_new_tokens=12)

    alone = await collect(engine, asked)
    others = [request(f"other {n}", strategy="sampling", max_new_tokens=20) for n in range(6)]
    crowd = await asyncio.gather(*(collect(engine, one) for one in [*others, asked]))

    assert sorted(ended(crowd[-1]), key=lambda end: end.index) == sorted(
        ended(alone), key=lambda end: end.index
    )
    assert ended(alone)[0].token_ids != ended(alone)[1].token_ids


async def test_a_seed_that_the_engine_drew_is_reported(make_engine: MakeEngine, spell) -> None:
    engine, _ = await make_engine(lambda source, tokens: np.zeros(258, np.float32))
    options = {"strategy": "sampling", "max_new_tokens": 8, "ignore_eos": True}

    first = await collect(engine, request(**options))
    again = await collect(engine, request(**options, seed=first[-1].seed))
    other = await collect(engine, request(**options))

    assert ended(again)[0].token_ids == ended(first)[0].token_ids
    assert ended(other)[0].token_ids != ended(first)[0].token_ids


# Bad input


@pytest.mark.parametrize(
    ("prompt", "options", "field", "words"),
    [
        ("", {}, "inputs[0].text", "empty"),
        ((), {}, "inputs[0].tokens", "empty"),
        ("x" * 64, {}, "inputs[0].text", "64 tokens are more than 63"),
        ("x" * 9000, {}, "inputs[0].text", "9000 tokens are more than 63"),
        ((1, 300, 2), {}, "inputs[0].tokens.ids[1]", "300 is outside the vocabulary, 0 to 257"),
        ((1, -1), {}, "inputs[0].tokens.ids[1]", "-1 is outside"),
        (
            "ab\ud800",
            {},
            "inputs[0].text",
            "not Unicode text: half a surrogate pair at character 3",
        ),
        ("x", {"temperature": 0.0}, "decoding.sampling.temperature", "above 0"),
        ("x", {"strategy": "sampling", "num_outputs": 5}, "decoding.num_outputs", "4 sequences"),
        ("x", {"stop_token_ids": (258,)}, "stopping.token_ids[0]", "outside the vocabulary"),
        ("x", {"min_new_tokens": 64}, "stopping.min_new_tokens", "64 is more than 63, the longest"),
        ("x", {"min_new_tokens": 2**31 - 1}, "stopping.min_new_tokens", "is more than 63"),
    ],
)
async def test_what_is_wrong_is_named_before_anything_is_queued(
    make_engine: MakeEngine, spell, prompt, options: dict, field: str, words: str
) -> None:
    engine, runner = await make_engine(spell("x"))

    with pytest.raises(InvalidRequest) as refusal:
        await collect(engine, request(prompt, **options))

    (violation,) = refusal.value.violations
    assert violation.field == field
    assert words in violation.description
    assert runner.batches == []


async def test_ids_of_a_source_are_of_its_own_vocabulary_and_those_of_a_prefix_of_the_target(
    make_engine: MakeEngine, spell
) -> None:
    engine, _ = await make_engine(spell("x"), max_source_len=8, source_vocab_size=300)

    def asked(source: int, prefix: int) -> GenerationRequest:
        return GenerationRequest("r", (source,), SamplingParams(), target_prefix=(prefix,))

    assert ended(await collect(engine, asked(299, 257)))[0].token_ids[0] == 257
    with pytest.raises(InvalidRequest) as refusal:
        await collect(engine, asked(300, 258))

    source, prefix = refusal.value.violations
    assert source.field == "inputs[0].tokens.ids[0]"
    assert source.description == "300 is outside the vocabulary, 0 to 299"
    assert prefix.field == "inputs[0].prefix_tokens.ids[0]"
    assert prefix.description == "258 is outside the vocabulary, 0 to 257"


async def test_all_wrong_fields_are_named_at_once(make_engine: MakeEngine, spell) -> None:
    engine, _ = await make_engine(spell("x"))

    with pytest.raises(InvalidRequest) as refusal:
        await collect(engine, request("", top_p=2.0, min_p=-1.0))

    assert len(refusal.value.violations) == 3


# Load, deadlines, cancels


async def test_a_full_queue_refuses_at_once_and_the_rest_goes_on(
    make_engine: MakeEngine, spell
) -> None:
    engine, runner = await make_engine(
        spell("answer"), config=EngineConfig(max_num_seqs=2, max_queue_size=3)
    )
    gate = Gate(runner)
    tasks = [asyncio.create_task(collect(engine, request(request_id=f"{n}"))) for n in range(8)]
    while engine.load().running + engine.load().waiting + sum(one.done() for one in tasks) < 8:
        await asyncio.sleep(0)
    gate.open()

    results = await asyncio.gather(*tasks, return_exceptions=True)

    refused = [result for result in results if isinstance(result, QueueFull)]
    answers = [ended(result)[0].text for result in results if isinstance(result, list)]
    assert len(refused) == 8 - 2 - 3 and all(error.retry_after > 0 for error in refused)
    assert answers == ["answer"] * (8 - len(refused))


async def test_a_request_that_cannot_meet_its_deadline_is_told_so_and_the_engine_goes_on(
    make_engine: MakeEngine, spell, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = await make_engine(spell("ok"))
    add = Scheduler.add

    def refuse(scheduler: Scheduler, source: TokenRequest) -> None:
        if source.deadline is not None:
            raise CannotMeet("too late", 1.5)
        add(scheduler, source)

    monkeypatch.setattr(Scheduler, "add", refuse)

    with pytest.raises(CannotMeet) as refused:
        await collect(engine, request(deadline=time.monotonic() + 60))
    events = await collect(engine, request())

    assert refused.value.retry_after == 1.5
    assert ended(events)[0].text == "ok"


async def test_what_was_computed_for_another_request_is_told_as_cached(
    make_engine: MakeEngine, spell
) -> None:
    config = EngineConfig(max_num_seqs=2, prefill_chunk_size=4)
    engine, _ = await make_engine(spell("ok"), config=config)

    first = await collect(engine, request("a question>"))
    second = await collect(engine, request("a question>"))

    assert [events[-1].usage.cached_input_tokens for events in (first, second)] == [0, 8]
    assert ended(first) == ended(second)


async def test_the_priority_and_the_tenant_of_a_request_reach_the_queue(
    make_engine: MakeEngine, spell: Callable
) -> None:
    engine, runner = await make_engine(spell("ok"), config=EngineConfig(max_num_seqs=1))
    is_open, order = threading.Event(), []
    runner.before_step = lambda: is_open.wait(60)

    async def ask(name: str, **options: object) -> None:
        asked = GenerationRequest(name, "say>", **options)
        await collect(engine, asked)
        order.append(name)

    asking = [asyncio.create_task(ask("running", tenant="busy"))]
    asking.append(asyncio.create_task(ask("later", priority=1)))
    asking.append(asyncio.create_task(ask("second of busy", tenant="busy")))
    asking.append(asyncio.create_task(ask("first of quiet", tenant="quiet")))
    while (engine.load().running, engine.load().waiting) != (1, 3):
        await asyncio.sleep(0)
    is_open.set()
    await asyncio.gather(*asking)

    assert order == ["running", "first of quiet", "second of busy", "later"]


async def test_closing_the_stream_frees_the_slot_by_the_end_of_the_step_in_flight(
    make_engine: MakeEngine, spell
) -> None:
    engine, runner = await make_engine(spell("x" * 60), config=EngineConfig(max_num_seqs=1))
    gate = Gate(runner)
    stream = engine.generate(request(request_id="first"))
    await anext(stream)
    await gate.step(2)
    waiting = asyncio.create_task(collect(engine, request("other>", max_new_tokens=1)))
    await asyncio.to_thread(gate.reached.acquire)  # a step is in flight

    await stream.aclose()
    before = len(runner.batches)
    gate.open()
    await waiting

    assert runner.batches[before].decode_ids != ()  # the step in flight
    assert runner.batches[before + 1].chunks[0].token_ids == tuple(b"other>")


async def test_a_cancelled_reader_aborts_its_request(make_engine: MakeEngine, spell) -> None:
    engine, runner = await make_engine(spell("x" * 60))
    gate = Gate(runner)
    task = asyncio.create_task(collect(engine, request()))
    await gate.step(2)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()
    while engine.load().running:
        await asyncio.sleep(0.001)

    assert len(runner.batches) < 10


async def test_a_deadline_ends_a_running_request(
    make_engine: MakeEngine, spell, clock: FakeClock
) -> None:
    engine, runner = await make_engine(spell("x" * 60), clock=clock)

    def step() -> None:
        clock.now += 0.01

    runner.before_step = step
    with pytest.raises(ExpiredInDecode, match="tokens generated"):
        await collect(engine, request(deadline=clock.now + 0.1))

    assert 1 < len(runner.batches) < 40


async def test_a_deadline_that_has_passed_is_refused_before_the_queue(
    make_engine: MakeEngine, spell
) -> None:
    engine, runner = await make_engine(spell("x"))

    with pytest.raises(ExpiredInQueue):
        await collect(engine, request(deadline=time.monotonic() - 1))

    assert runner.batches == []


async def test_memory_is_put_in_order_when_no_request_has_come_for_a_moment(
    make_engine: MakeEngine, spell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.generation.engine_loop.KEEP_MEMORY", 60.0)
    engine, runner = await make_engine(spell("x"))

    for _ in range(2):
        await collect(engine, request())

    computing = [bool(batch.chunks or batch.decode_ids) for batch in runner.batches]
    assert all(computing), "no step between two requests was for memory alone"


async def test_an_idle_engine_sleeps(
    make_engine: MakeEngine, spell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.generation.engine_loop.KEEP_MEMORY", 0.01)
    engine, runner = await make_engine(spell("x"))
    await collect(engine, request())
    while any(runner.rows):
        await asyncio.sleep(0.001)

    await asyncio.sleep(0.05)

    computing = [bool(batch.chunks or batch.decode_ids) for batch in runner.batches]
    assert computing == [True] * (len(computing) - 1) + [False], "one to clear the slot"
    assert runner.rows == [[]] * 4


async def test_load_counts_what_runs_and_what_waits(make_engine: MakeEngine, spell) -> None:
    engine, runner = await make_engine(spell("x" * 30), config=EngineConfig(max_num_seqs=2))
    gate = Gate(runner)
    tasks = [asyncio.create_task(collect(engine, request())) for _ in range(5)]
    await gate.step(3)

    load = engine.load()
    gate.open()
    await asyncio.gather(*tasks)

    assert (load.running, load.waiting, load.cache_used) == (2, 3, 1.0)
    assert engine.load().tokens_per_second > 0


# Failures


async def test_an_exception_in_a_step_reaches_every_stream_and_the_engine_goes_on(
    make_engine: MakeEngine, spell, caplog: pytest.LogCaptureFixture
) -> None:
    engine, runner = await make_engine(spell("fine"), config=EngineConfig(max_num_seqs=2))
    gate = Gate(runner)
    names = [f"id-{n}" for n in range(4)]
    tasks = [asyncio.create_task(collect(engine, request(request_id=name))) for name in names]
    await gate.step(2)

    def fail() -> None:
        runner.before_step = lambda: None
        raise RuntimeError("secret detail")

    runner.before_step = fail
    gate.open()
    with caplog.at_level(logging.ERROR):
        results = await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(result, EngineFailure) for result in results)
    assert all(name in str(result) for name, result in zip(names, results, strict=True))
    assert all("secret detail" not in str(result) for result in results)
    assert "secret detail" in caplog.text
    assert ended(await collect(engine, request()))[0].text == "fine"
    assert engine.healthy


async def test_after_three_failures_in_a_row_the_engine_is_unhealthy_until_a_step_works(
    make_engine: MakeEngine, spell, caplog: pytest.LogCaptureFixture
) -> None:
    engine, runner = await make_engine(spell("fine"))

    def fail() -> None:
        raise RuntimeError

    runner.before_step = fail
    health = []
    for _ in range(3):
        with pytest.raises(EngineFailure):
            await collect(engine, request())
        health.append(engine.healthy)
    runner.before_step = lambda: None
    await collect(engine, request())

    assert health == [True, True, False]
    assert engine.healthy


async def test_room_that_a_fault_has_left_behind_is_given_back_when_nobody_waits(
    make_engine: MakeEngine, spell, caplog
) -> None:
    engine, runner = await make_engine(spell("hello"), config=EngineConfig(max_num_seqs=1))

    def leave_something() -> None:
        engine._steps._core.scheduler._num_sequences += 1  # a request that is gone
        runner.before_step = lambda: None

    runner.before_step = leave_something
    first = await collect(engine, request())
    async with asyncio.timeout(60):
        while "not in order: 0 sequences run, and 1 are counted" not in caplog.text:
            await asyncio.sleep(0.01)
        second = await collect(engine, request())

    assert ended(first)[0].text == ended(second)[0].text == "hello"


async def test_an_engine_whose_thread_has_died_fails_streams_and_refuses_new_ones(
    make_engine: MakeEngine, spell, caplog: pytest.LogCaptureFixture
) -> None:
    engine, runner = await make_engine(spell("fine"))

    def fail() -> None:
        raise RuntimeError

    runner.before_step = runner.reset = fail

    with pytest.raises(EngineFailure, match="r-1"):
        await collect(engine, request())
    with pytest.raises(ReplicaLost):  # so that a gateway asks another one
        await collect(engine, request())

    assert not engine.healthy


async def test_a_step_that_never_returns_ends_all_as_lost_and_the_engine_is_unhealthy(
    make_engine: MakeEngine, spell, caplog: pytest.LogCaptureFixture
) -> None:
    engine, runner = await make_engine(
        spell("never told"), config=EngineConfig(max_num_seqs=1, max_step_seconds=0.2)
    )
    gate = Gate(runner)
    tasks = [asyncio.create_task(collect(engine, request())) for _ in range(2)]

    async with asyncio.timeout(60):
        results = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(ReplicaLost):  # so that a gateway asks another one
            await collect(engine, request())
        await engine.stop(grace=5)

    assert [type(result) for result in results] == [ReplicaLost, ReplicaLost]
    assert not engine.healthy
    assert "scripted has taken more than 0.2 s" in caplog.text
    gate.open()


async def test_an_engine_is_watched_on_after_an_error_in_watching(
    make_engine: MakeEngine,
    spell,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_once(monkeypatch)
    engine, runner = await make_engine(
        spell("never told"), config=EngineConfig(max_num_seqs=1, max_step_seconds=0.2)
    )
    gate = Gate(runner)

    async with asyncio.timeout(60):
        with pytest.raises(ReplicaLost):
            await collect(engine, request())
        await engine.stop()

    assert "watching engine has failed; it begins anew" in caplog.text
    gate.open()


async def test_logits_that_are_not_finite_end_that_request_only(make_engine: MakeEngine) -> None:
    def script(source: list[int], tokens: list[int]) -> np.ndarray:
        logits = np.zeros(258, np.float32)
        logits[ord("y")] = np.nan if tokens[0] == ord("!") and len(tokens) > 3 else 1.0
        return logits

    engine, _ = await make_engine(script)

    bad, good = await asyncio.gather(
        collect(engine, request("!>", request_id="bad")),
        collect(engine, request(".>", max_new_tokens=9)),
        return_exceptions=True,
    )

    assert isinstance(bad, EngineFailure) and "bad: the model's logits are not finite" in str(bad)
    assert ended(good)[0].text == "y" * 9


# Start and stop


async def test_before_start_requests_are_told_to_come_back(
    make_package, make_core, byte_tokenizer, spell
) -> None:
    core, _ = make_core(spell("x"))
    config, constraints = EngineConfig(max_num_seqs=4), ConstraintCompiler(byte_tokenizer, 258, ())
    engine = AsyncEngine(
        make_package(),
        core,
        SourceAndTarget(byte_tokenizer, byte_tokenizer),
        config,
        constraints=constraints,
    )

    with pytest.raises(Starting):
        await collect(engine, request())

    assert not engine.healthy
    await engine.stop()


async def test_stop_lets_open_requests_end_and_refuses_new_ones(
    make_engine: MakeEngine, spell
) -> None:
    engine, runner = await make_engine(spell("to the end"))
    gate = Gate(runner)
    open_request = asyncio.create_task(collect(engine, request()))
    await gate.step(2)

    stopping = asyncio.create_task(engine.stop(grace=20))
    await asyncio.sleep(0.01)
    with pytest.raises(Draining):
        await collect(engine, request())
    gate.open()
    await stopping

    assert ended(await open_request)[0].text == "to the end"
    assert not engine.healthy


async def test_stop_ends_what_is_open_after_the_grace(make_engine: MakeEngine, spell) -> None:
    engine, runner = await make_engine(
        spell("x" * 1000), config=EngineConfig(max_num_seqs=1), max_len=1024
    )
    runner.before_step = lambda: time.sleep(0.02)
    tasks = [asyncio.create_task(collect(engine, request())) for _ in range(3)]
    await asyncio.sleep(0.05)

    await engine.stop(grace=0.05)
    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(result, Draining) for result in results)


@pytest.mark.parametrize("options", [{}, {"strategy": "beam", "beam_width": 2}])
async def test_stop_gives_what_there_is_to_those_who_allow_it(
    make_engine: MakeEngine, spell, options: dict[str, object]
) -> None:
    engine, runner = await make_engine(
        spell("x" * 1000), config=EngineConfig(max_num_seqs=2), max_len=1024
    )
    runner.before_step = lambda: time.sleep(0.02)
    running = asyncio.create_task(collect(engine, request(allow_partial=True, **options)))
    while len(runner.batches) < 3:
        await asyncio.sleep(0.005)
    waiting = asyncio.create_task(
        collect(engine, request(strategy="beam", beam_width=2, allow_partial=True))
    )
    await asyncio.sleep(0.01)

    await engine.stop()

    (end,) = ended(await running)
    assert end.reason is FinishReason.DRAINED
    assert end.text and set(end.text) == {"x"}
    with pytest.raises(Draining):
        await waiting


async def test_capabilities_and_package_are_told(make_engine: MakeEngine, spell) -> None:
    engine, _ = await make_engine(spell("x"))

    assert {"generate", "stream", "sampling", "stop", "num_outputs"} < set(engine.capabilities)
    assert engine.package.manifest.name == "scripted"


# Warm-up


def unstarted(
    make_package, tokenizer, runner: object, warm_up: Callable[[], WarmUpResult]
) -> AsyncEngine:
    package, config = make_package(), EngineConfig(max_num_seqs=1)
    core = core_on_slots(config, package.manifest.generation, runner)
    constraints = ConstraintCompiler(tokenizer, 258, ())
    return AsyncEngine(
        package,
        core,
        SourceAndTarget(tokenizer, tokenizer),
        config,
        constraints=constraints,
        warm_up=warm_up,
    )


async def test_the_model_is_tried_out_in_the_thread_that_will_run_it(
    make_package, byte_tokenizer, make_engine: MakeEngine, spell
) -> None:
    threads: list[threading.Thread] = []
    _, runner = await make_engine(spell("x"))
    runner.before_step = lambda: threads.append(threading.current_thread())

    def warm_up() -> WarmUpResult:
        threads.append(threading.current_thread())
        assert engine.is_warming and not engine.healthy
        return WarmUpResult(is_batch_invariant=False)

    engine = unstarted(make_package, byte_tokenizer, runner, warm_up)
    await engine.start()
    assert engine.healthy and "batch_invariant" not in engine.capabilities
    await collect(engine, request())
    await engine.stop()

    assert len(threads) > 1 and len(set(threads)) == 1


async def test_an_engine_whose_model_fails_when_tried_out_does_not_start(
    make_package, byte_tokenizer
) -> None:
    def warm_up() -> WarmUpResult:
        raise PackageError("decoding failed")

    engine = unstarted(make_package, byte_tokenizer, Mock(is_on_device=False), warm_up)

    with pytest.raises(PackageError, match="decoding failed"):
        await engine.start()
    assert not engine.healthy
    await engine.stop()


async def test_an_engine_that_is_stopped_while_it_tries_its_model_out_never_runs(
    make_package, byte_tokenizer
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def warm_up() -> WarmUpResult:
        begun.set()
        assert go_on.wait(60)
        return WarmUpResult()

    engine = unstarted(make_package, byte_tokenizer, Mock(is_on_device=False), warm_up)
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(begun.wait, 60)
    started, _ = await asyncio.wait({starting}, timeout=0.1)
    assert not started and engine.is_warming
    with pytest.raises(Starting):
        await collect(engine, request())

    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(starting, stopping)

    assert not engine.healthy
    with pytest.raises(Draining):
        await collect(engine, request())
