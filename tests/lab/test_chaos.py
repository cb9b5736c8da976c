"""Chaos: what is said of answers and of harm; and a short run of it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenweir import (
    AsyncClient,
    BrokenStream,
    DeadlineExceeded,
    GeneratedSequence,
    Unavailable,
)

from exporter.models import TransformerConfig
from loadtest.errors import LoadTestError
from loadtest.lab.chaos.answers import Tally, verdict
from loadtest.lab.chaos.command import Outcome, Plan, do_harm, main, write
from loadtest.lab.chaos.harm import Harmed, harm
from loadtest.lab.chaos.load import Case, Load
from loadtest.lab.chaos.report import failures, summary, table
from loadtest.lab.chaos.server import CONTROLLER, WORKER, Server
from tests.fakes.served import tiny_package

pytestmark = pytest.mark.long

EXPECTED = GeneratedSequence("abc", (1, 2, 3), "length", None, -1.5)


@pytest.mark.parametrize(
    ("got", "found"),
    [
        (EXPECTED, "right"),
        (replace(EXPECTED, text="ab", token_ids=(1, 2)), "lost"),
        (replace(EXPECTED, text="ac", token_ids=(1, 3)), "lost"),
        (replace(EXPECTED, text="abbc", token_ids=(1, 2, 2, 3)), "doubled"),
        (replace(EXPECTED, text="abd", token_ids=(1, 2, 4)), "different"),
        (replace(EXPECTED, text="abb"), "different"),
        (replace(EXPECTED, sum_logprob=-1.25), "different"),
    ],
)
def test_an_answer_is_right_only_bit_for_bit(got: GeneratedSequence, found: str) -> None:
    assert verdict(got, EXPECTED) == found


class Stream:
    """A client's stream: pieces, then a result or an error."""

    def __init__(self, pieces: list[str], end: GeneratedSequence | Exception) -> None:
        self._pieces, self._end = pieces, end

    async def __aiter__(self) -> AsyncIterator[str]:
        for piece in self._pieces:
            yield piece
        if isinstance(self._end, Exception):
            raise self._end

    @property
    def result(self) -> Any:
        return type("Result", (), {"sequences": (self._end,)})


class Scripted:
    """A client whose streams are given; behind the last one it waits to be over."""

    def __init__(self, streams: list[Stream]) -> None:
        self.streams = streams
        self.is_empty = asyncio.Event()

    def stream(self, model: str, prompt: str, **options: Any) -> Stream:
        if len(self.streams) == 1:
            self.is_empty.set()
        return self.streams.pop(0)


async def test_every_stream_is_counted_by_what_became_of_it() -> None:
    gone = Unavailable("gone", code=grpc.StatusCode.UNAVAILABLE, reason="REPLICA_LOST")
    client = Scripted(
        [
            Stream(["ab", "c"], EXPECTED),
            Stream(["ab", "bc"], EXPECTED),  # whatever its result says
            Stream(["ab"], replace(EXPECTED, text="ab", token_ids=(1, 2))),
            Stream(["ab"], DeadlineExceeded("late", code=grpc.StatusCode.DEADLINE_EXCEEDED)),
            Stream(["ab"], BrokenStream("message 3 came where 2 was due")),
            Stream(["ab"], gone),
        ]
    )
    load = Load(cast(AsyncClient, client), "m", [Case("p", {}, (EXPECTED,))])

    async with load.going_on(1):
        await client.is_empty.wait()

    assert load.tally == Tally(
        right=1, different=1, lost=1, broken=1, hung=1, failed=load.tally.failed, num_tokens=3
    )
    assert dict(load.tally.failed) == {"UNAVAILABLE REPLICA_LOST amid its text": 1}
    assert load.failures_between(load.failures[0][0], math.inf)[0].endswith("REPLICA_LOST: gone")
    assert not load.failures_between(0.0, load.failures[0][0])
    assert [line.partition(":")[0] for line in load.wrong] == ["different", "lost", "broken"]
    assert load.first_answer_after(0.0) is not None
    assert load.first_answer_after(load.ends[0][1]) is None


def test_streams_that_failed_are_written_by_what_they_were_told(tmp_path: Path) -> None:
    load = Load(cast(AsyncClient, Scripted([])), "m", [])
    load.tally.failed["UNAVAILABLE DRAINING"] += 2

    write(tmp_path / "r", Plan((), 1.0, 1, 1, 1, 1), Outcome(load, []), 0)

    streams = json.loads((tmp_path / "r.json").read_text())["streams"]
    assert streams["failed"] == {"UNAVAILABLE DRAINING": 2}


def test_harm_is_told_by_its_kind() -> None:
    harmed = [Harmed("kill-worker", 1.0, 0.5), Harmed("kill-worker", 3.0, None)]
    harmed.append(Harmed("stop-worker", 5.0, 2.0, ("after 1 s: gone", "after 2 s: gone")))
    harmed.append(Harmed("stop-worker", 5.0, 2.0, ("after 2 s: gone",)))

    found = summary(harmed)
    said = table(harmed, Tally(right=7), 4).splitlines()

    assert found["kill-worker"] == {
        "times": 2,
        "recovery_seconds": {"median": 2.0, "largest": 3.0},
        "first_answer_seconds": {"median": 0.5, "largest": 0.5},
    }
    assert said[1].split() == "kill-worker 2 2.0 / 3.0 0.5 / 0.5 0".split()
    assert said[2].split() == "stop-worker 2 5.0 / 5.0 2.0 / 2.0 3".split()
    assert failures(harmed) == {"stop-worker": {"after 2 s: gone": 2, "after 1 s: gone": 1}}
    assert said[-1].split() == ["gone", "on", "4"]


def test_harm_waits_until_there_is_somebody_to_do_it_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found: list[list[int]] = [[], [], [gone.pid], [victim.pid]]
    server = Server(tmp_path, 1, tmp_path / "log")
    monkeypatch.setattr(server, "find", lambda _: found.pop(0))

    with victim:
        assert harm("kill-worker", server) == victim.pid
        assert victim.wait(60) == -signal.SIGKILL
    assert not found


@pytest.mark.parametrize("kind", ["pause-server", "pause-controller"])
def test_what_stands_still_goes_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    server = Server(tmp_path, 1, tmp_path / "log")
    monkeypatch.setattr(server, "process", victim, raising=False)
    monkeypatch.setattr(server, "find", lambda what: [victim.pid] if what == CONTROLLER else [])

    def state() -> str:
        return Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def wait(seconds: float) -> None:
        while (now := state()) != "T":  # a signal takes a moment
            os.sched_yield()
        states.append(now)

    monkeypatch.setattr("loadtest.lab.chaos.harm.time", SimpleNamespace(sleep=wait))
    with victim:
        assert harm(kind, server) is None
        assert victim.stdin is not None
        victim.stdin.write(b"\n")
        victim.stdin.flush()
        assert victim.wait(60) == 0, "it goes on"

    assert states == ["T"]


def test_a_controller_that_was_killed_is_there_again_when_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = [[victim.pid], [victim.pid], [], [7]]
    server = Server(tmp_path, 1, tmp_path / "log")
    monkeypatch.setattr(server, "find", lambda _: found.pop(0))

    with victim:
        assert harm("kill-controller", server) == victim.pid
    assert not found


def test_a_server_is_whole_when_it_has_noticed_the_harm_and_is_whole_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, 2, tmp_path / "log")
    said = [2, 2, 1, 1]  # workers: at first nobody knows that one is dead
    monkeypatch.setattr(server, "process", SimpleNamespace(poll=lambda: None), raising=False)
    monkeypatch.setattr(server, "num_serving", lambda: said.pop(0) if said else 2)

    server.wait_until_whole()

    assert not said


def test_a_worker_that_ray_would_wait_for_is_not_stopped(tmp_path: Path) -> None:
    asked = (str(tmp_path), "--replicas", "3", "--serving", "2")

    refused = CliRunner().invoke(main, asked)

    assert refused.exit_code == 2
    assert "for which Ray waits for ever; leave out --serving" in refused.output


def test_a_run_that_is_interrupted_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(server: Server, plan: Plan) -> Outcome:
        assert [*tmp_path.glob("chaos-*")]
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("loadtest.lab.chaos.command.run", interrupted)

    assert CliRunner().invoke(main, [str(tmp_path)]).exit_code == 1

    assert not [*tmp_path.iterdir()]


async def test_what_was_found_is_told_of_a_run_that_breaks_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = Load(cast(AsyncClient, Scripted([])), "m", [])
    load.tally.right = 7
    recoveries = [2.0, 3.0, None]  # seconds

    def wait_until_whole(gone: int | None, num_serving: int) -> float:
        if (recovery := recoveries.pop(0)) is None:
            raise LoadTestError("too few workers serve")
        return time.monotonic() + recovery

    monkeypatch.setattr("loadtest.lab.chaos.command.harm", lambda kind, server: None)
    server = cast(Server, SimpleNamespace(wait_until_whole=wait_until_whole))

    outcome = await do_harm(server, load, Plan(("kill", "stop"), 1.0, 9, 0, 1, 1), pause=0.0)

    assert [(one.kind, round(one.recovery)) for one in outcome.harmed] == [("kill", 2), ("stop", 3)]
    assert outcome.broken_off == "behind kill: too few workers serve"
    assert not outcome.is_good
    assert replace(outcome, broken_off="").is_good


def test_who_stands_still_ends_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, 1, tmp_path / "log")
    waits = (sys.executable, "-c", "input()")
    worker = subprocess.Popen(waits, stdin=subprocess.PIPE)
    process = subprocess.Popen(waits, stdin=subprocess.PIPE)
    monkeypatch.setattr(server, "process", process, raising=False)
    monkeypatch.setattr(server, "find", lambda what: [worker.pid] if what == WORKER else [])
    worker.send_signal(signal.SIGSTOP)

    with worker, process:
        try:
            server.stop()
            assert worker.wait(60) == -signal.SIGKILL
        finally:
            worker.kill()


@pytest.mark.parametrize(
    ("tally", "is_good"),
    [
        (Tally(right=1, failed=Counter({"UNAVAILABLE": 3})), True),
        (Tally(failed=Counter({"UNAVAILABLE": 3})), False),  # nobody has shown anything
        (Tally(right=1, lost=1), False),
        (Tally(right=1, broken=1), False),
        (Tally(right=1, hung=1), False),
    ],
)
def test_a_run_without_a_right_answer_shows_nothing(tally: Tally, is_good: bool) -> None:
    assert tally.is_good is is_good


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer_file: Path) -> Path:
    """Export a model over bytes that writes anything, two hundred tokens of it."""
    config = TransformerConfig(
        architecture="decoder",
        num_decoder_layers=2,
        max_target_len=256,
        d_model=64,
        num_heads=2,
        d_ff=128,
        vocab_size=258,
        eos_token_id=257,
    )
    tokenizer = Tokenizer.from_file(str(byte_tokenizer_file))
    return tiny_package(tmp_path_factory.mktemp("model"), config, tokenizer)


@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_nothing_is_lost_doubled_or_different(package: Path, tmp_path: Path) -> None:
    options = ("--minutes", "5", "--harms", "7", "--concurrency", "6")
    command = (sys.executable, "-m", "loadtest.lab", "chaos", str(package), *options)

    ended = subprocess.run((*command, "--out", str(tmp_path / "r")), capture_output=True, text=True)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    streams = json.loads((tmp_path / "r.json").read_text())["streams"]
    assert streams["right"] > 7
    assert all(not streams[name] for name in ("lost", "doubled", "different", "broken", "hung"))
