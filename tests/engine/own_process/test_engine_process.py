"""An engine in a process of its own: answers, refusals, what it tells, and how either one ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import (
    Draining,
    EngineFailure,
    ExpiredInDecode,
    InvalidRequest,
    OutOfDeviceMemory,
    QueueFull,
    ReplicaLost,
    Starting,
)
from engine.generation.async_engine import AsyncEngine
from engine.generation.parts import MakeParts
from engine.own_process.engine_process import EngineProcess
from engine.requests.events import FinishReason, GenerationEvent, SequenceFinished, TextDelta
from engine.requests.request import Constraint, GenerationRequest, SamplingParams, ScoreRequest
from engine.text.tokenizer import SourceAndTarget
from tests.engine.own_process import process_parts
from tests.engine.own_process.process_parts import TEXT

CONFIG = EngineConfig(max_num_seqs=4, max_step_seconds=30)
Load = Callable[..., AsyncEngine]
Start = Callable[..., Awaitable[AsyncEngine]]


def process_of(engine: AsyncEngine) -> subprocess.Popen[bytes]:
    assert isinstance(engine._steps, EngineProcess)
    return engine._steps._process


async def collect(
    engine: AsyncEngine, prompt: str = "say>", deadline: float | None = None, **params: Any
) -> list[GenerationEvent]:
    asked = GenerationRequest(f"id of {prompt}", prompt, SamplingParams(**params), deadline)
    return [event async for event in engine.generate(asked)]


async def end_of(engine: AsyncEngine, prompt: str = "say>", **params: Any) -> SequenceFinished:
    (end,) = [e for e in await collect(engine, prompt, **params) if isinstance(e, SequenceFinished)]
    return end


async def begun(engine: AsyncEngine, prompt: str, count: int = 1) -> list[asyncio.Task[Any]]:
    """Ask, and return when the first tokens have come."""
    tasks, first = [], [asyncio.Event() for _ in range(count)]

    async def read(come: asyncio.Event) -> None:
        asked = GenerationRequest("r", prompt, SamplingParams(allow_partial=True))
        async for event in engine.generate(asked):
            if isinstance(event, TextDelta):
                come.set()

    tasks = [asyncio.create_task(read(come)) for come in first]
    await asyncio.gather(*(come.wait() for come in first))
    return tasks


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def load(make_package, byte_tokenizer, byte_tokenizer_file: Path) -> Iterator[Load]:
    """Load an engine in a process; whatever becomes of it, the process is gone behind the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def make(
        config: EngineConfig = CONFIG,
        make_parts: Callable[..., Any] = process_parts.make_scripted,
        *more: Any,
        tell: Callable[[str], None] = lambda line: None,
        max_len: int = 64,
    ) -> AsyncEngine:
        package = make_package(max_len=max_len)
        given = (byte_tokenizer_file, package.manifest.generation, config, *more)
        parts: MakeParts = partial(make_parts, *given)
        process = EngineProcess("scripted", parts, config.max_step_seconds, niceness=0, tell=tell)
        processes.append(process._process)
        tokenizers = SourceAndTarget(byte_tokenizer, byte_tokenizer)
        return AsyncEngine(package, process, tokenizers, process.config, constraints=process)

    yield make
    assert [process.poll() is None for process in processes] == [False] * len(processes)


@pytest.fixture
async def start(load: Load) -> Any:
    engines: list[AsyncEngine] = []

    async def make(*given: Any, **options: Any) -> AsyncEngine:
        engines.append(engine := load(*given, **options))
        await engine.start()
        return engine

    yield make
    for engine in engines:
        await engine.stop()


async def test_a_process_answers_as_a_thread_does_and_is_another(start: Start) -> None:
    lines: list[str] = []
    engine = await start(tell=lines.append)

    ends = await asyncio.gather(*(end_of(engine, f"{n}>") for n in range(9)))

    assert {end.text.encode() for end in ends} == {TEXT}
    assert {end.reason for end in ends} == {FinishReason.EOS}
    assert lines == [f"loaded by process {process_of(engine).pid}", "in MainThread tried out"]
    assert process_of(engine).pid != os.getpid()
    assert engine.healthy and "batch_invariant" not in engine.capabilities


async def test_what_cannot_cross_is_made_behind_the_border(start: Start) -> None:
    engine = await start()

    chosen = await end_of(engine, constraint=Constraint("choice", ("no", "a dog")))
    beam = await end_of(engine, strategy="beam", beam_width=2, stop_strings=("of",))
    sampled = await end_of(engine, strategy="sampling", seed=7, stop_strings=("xt",))
    score = await engine.score(ScoreRequest("s", "say>", "a t", top_logprobs=2))

    assert chosen.text in ("no", "a dog")
    assert beam.text == "a text " and beam.matched_stop == "of"
    assert sampled.text == "a te"
    assert [len(position.top) for position in score.positions] == [2, 2, 2]


async def test_what_is_wrong_with_a_constraint_is_told_before_anything_waits(start: Start) -> None:
    engine = await start()

    with pytest.raises(InvalidRequest) as caught:
        await collect(engine, constraint=Constraint("regex", ("(",)))

    assert caught.value.violations[0].field == "decoding.constraint.regex"
    assert (await end_of(engine)).text.encode() == TEXT


async def test_refusals_keep_what_they_carry(start: Start) -> None:
    engine = await start(EngineConfig(max_num_seqs=1, max_queue_size=1), max_len=1024)
    tasks = await begun(engine, "slowly>")
    tasks.append(asyncio.create_task(collect(engine, "say>")))
    await until(lambda: (engine.load().running, engine.load().waiting) == (1, 1))

    with pytest.raises(QueueFull) as caught:
        await collect(engine, "say>")

    assert caught.value.retry_after > 0 and "wait" in str(caught.value)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_deadline_ends_a_request_and_who_goes_away_gives_room(start: Start) -> None:
    engine = await start(EngineConfig(max_num_seqs=1), max_len=1024)

    with pytest.raises(ExpiredInDecode):
        await collect(engine, "slowly>", deadline=time.monotonic() + 0.5)
    (task,) = await begun(engine, "slowly>")
    await until(lambda: engine.load().running == 1)
    task.cancel()

    assert (await end_of(engine)).text.encode() == TEXT
    await until(lambda: engine.load().running == 0)
    assert engine.load().wasted.cancelled_tokens > 0
    assert engine.load().wasted.expired_tokens > 0


async def test_load_times_and_measures_are_there_when_an_answer_is(start: Start) -> None:
    engine = await start()

    end = await end_of(engine)

    load = engine.load()
    assert (load.running, load.waiting, load.cache_used) == (0, 0, 0.0)
    assert load.tokens_per_second > 0
    assert engine.step_times.steps == len(end.token_ids)
    assert sum(engine.measures.seconds.counts()[:-1]) == len(end.token_ids)


async def test_what_it_logs_is_logged_here(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "engine"):
        engine = await start()
        await end_of(engine, "log>", max_new_tokens=2)

    (first, _) = [one for one in caplog.records if one.name == "engine.scripted"]
    assert first.getMessage() == "said 0" and first.fields == {"said": 0}
    assert first.process == process_of(engine).pid
    assert first.threadName == "MainThread", "which has tried the model out: captures are its own"


# Failures


@pytest.mark.parametrize(
    ("make_parts", "error", "words"),
    [
        (process_parts.make_nothing, OutOfDeviceMemory, "no room for the weights"),
        (process_parts.make_by_mistake, EngineFailure, "ZeroDivisionError: a bug"),
        (process_parts.make_and_die, EngineFailure, "ended while it loaded the model: SIGKILL"),
    ],
)
def test_what_fails_while_the_model_is_loaded_is_raised_with_its_type_and_text(
    make_parts: MakeParts, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        EngineProcess("scripted", make_parts, 8.0, niceness=0, tell=print)

    if isinstance(caught.value, OutOfDeviceMemory):
        assert caught.value.lacking == 7


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("fails", OutOfDeviceMemory, "no room for the weights"),
        ("dies", EngineFailure, "ended while it tried the model out: SIGKILL"),
    ],
)
async def test_what_fails_while_the_model_is_tried_out_is_raised_likewise(
    load: Load, how: str, error: type[Exception], words: str
) -> None:
    engine = load(CONFIG, process_parts.make_untried, how)
    with pytest.raises(Starting):
        await collect(engine)

    with pytest.raises(error, match=words):
        await engine.start()

    assert not engine.healthy
    await engine.stop()


async def test_a_process_that_dies_is_lost_to_all_at_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start(max_len=1024)
    tasks = await begun(engine, "slowly>", 3)

    process_of(engine).kill()
    async with asyncio.timeout(5):
        results = await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(result) for result in results] == [ReplicaLost] * 3
    assert not engine.healthy
    with pytest.raises(ReplicaLost):
        await collect(engine)
    with pytest.raises(ReplicaLost):
        await collect(engine, constraint=Constraint("choice", ("a", "b")))
    await engine.stop()
    assert "the process of the engine of scripted has ended: SIGKILL" in caplog.text


@pytest.mark.parametrize("prompt", ["stop>", "hang>"])
async def test_a_process_that_does_nothing_any_more_is_lost_and_ended(
    start: Start, prompt: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start(EngineConfig(max_num_seqs=2, max_step_seconds=1))

    async with asyncio.timeout(60):
        with pytest.raises(ReplicaLost):
            await collect(engine, prompt)
        assert not engine.healthy
        await engine.stop()

    assert "has taken more than 1 s" in caplog.text
    assert process_of(engine).returncode == -signal.SIGKILL


async def test_a_step_that_fails_is_told_by_name_and_three_are_not_healthy(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start()

    for _ in range(3):
        assert engine.healthy
        with pytest.raises(EngineFailure, match="id of fail>"):
            await collect(engine, "fail>")
    await until(lambda: not engine.healthy)

    assert "secret detail" in caplog.text
    assert (await end_of(engine)).text.encode() == TEXT
    assert engine.healthy


# Ends


async def test_what_is_open_gets_its_time_and_then_what_there_is(start: Start) -> None:
    engine = await start(max_len=1024)
    tasks = await begun(engine, "slowly>")
    whole_or_nothing = asyncio.create_task(collect(engine, "slowly>"))
    await until(lambda: engine.load().running == 2)
    to_the_end = asyncio.create_task(end_of(engine, "say>", max_new_tokens=5))
    await until(lambda: engine.load().running == 3 or to_the_end.done())

    await engine.stop(grace=1)

    assert (await to_the_end).text.encode() == TEXT[:5]
    assert await asyncio.gather(*tasks) == [None]  # it allows to end with what there is
    with pytest.raises(Draining):
        await whole_or_nothing
    assert process_of(engine).returncode == 0
    with pytest.raises(Draining):
        await collect(engine)


async def test_an_engine_that_was_never_started_ends_its_process(load: Load) -> None:
    engine = load()

    await engine.stop()

    assert process_of(engine).returncode is not None


async def test_signals_that_go_to_all_processes_are_the_workers(start: Start) -> None:
    engine = await start()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process_of(engine).send_signal(number)

    assert (await end_of(engine)).text.encode() == TEXT


_WORKER = """
import asyncio, sys
from functools import partial
from engine.config import EngineConfig
from engine.own_process.engine_process import EngineProcess
from engine.package.manifest import CacheShape, GenerationContract
from tests.engine.own_process import process_parts

def tell(line):
    print(line.split()[-1], flush=True)

if sys.argv[1] == "loading":
    EngineProcess("slow", process_parts.make_slowly, 8.0, niceness=0, tell=tell)
cache = CacheShape(num_layers=1, num_kv_heads=1, max_len=64, head_dim=1)
contract = GenerationContract(vocab_size=258, num_heads=1, cache=cache, cross_cache=None,
                              decoder_start_token_id=None, eos_token_ids=(257,))
make = partial(process_parts.make_scripted, sys.argv[2], contract, EngineConfig(max_num_seqs=2))

async def main():
    process = EngineProcess("fast", make, 8.0, niceness=0, tell=tell)
    await process.start(print, print)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@contextmanager
def worker(*given: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _WORKER, *given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("when", ["loading", "serving"])
def test_a_process_ends_with_a_worker_that_is_killed(when: str, byte_tokenizer_file: Path) -> None:
    with worker(when, str(byte_tokenizer_file)) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if when == "serving":
            assert parent.stdout.readline() == "out\n"
        assert Path(f"/proc/{child}").exists()

        parent.kill()
        parent.wait()

        end = time.monotonic() + 30
        while is_alive(child) and time.monotonic() < end:
            time.sleep(0.01)
        assert not is_alive(child)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
