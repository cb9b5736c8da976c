"""The studies: their turns and sums; no test looks at a clock."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
from click.testing import CliRunner
from tokenweir.v1.generation_service_pb2 import GenerateStreamRequest

from loadtest.benchmark.work import BenchmarkWork
from loadtest.errors import LoadTestError
from loadtest.lab import regression
from loadtest.lab.first_token import first_token_of, measure_first_token
from loadtest.lab.overhead import Cost, costs_of
from loadtest.lab.overhead_stages import STAGES, Used, Work, served
from loadtest.lab.overload import Goodput, Overload, measure_goodput, prompts
from loadtest.lab.process_tree import read_tree
from loadtest.lab.regression import (
    Limits,
    ServerSide,
    Tree,
    Turn,
    engine_of,
    open_client,
    pairs_of,
    result_of,
    take_turns,
)
from loadtest.lab.serve import ROOT
from loadtest.lab.turns import Ratio, ratio_of
from loadtest.metrics import OwnLoad, RequestRecord
from tests.fakes.scripted_server import scripted_server, stream_messages
from tests.fakes.served import tiny_package

pytestmark = pytest.mark.long


def test_a_server_is_asked_for_the_work_of_a_turn_and_no_prompt_twice() -> None:
    work = BenchmarkWork(num_prompt_tokens=6, num_new_tokens=2)
    with scripted_server() as server, asyncio.Runner() as runner:
        server.answers["GenerateStream"] = lambda request, context: stream_messages(["a", "b"])
        client = runner.run(open_client(server.address))
        side = ServerSide(client, runner, os.getpid(), 11)
        turns = [side.do(2, number, work) for number in range(3)]
        with pytest.raises(LoadTestError, match="asked for 3 tokens, got 2"):
            side.do(2, 3, replace(work, num_new_tokens=3))
        runner.run(client.close())

    asked = [tuple(request.request.inputs[0].tokens.ids) for request in server.requests[-8:]]
    assert len(set(asked)) == len(asked) == 8 and {len(prompt) for prompt in asked} == {6}
    assert all(turn.wall > 0 and turn.processor >= 0 for turn in turns)


def test_engines_are_held_against_engines_and_each_against_its_server() -> None:
    assert pairs_of(["new", "old"], False) == {"engine by engine of old": (0, 1)}
    assert pairs_of(["new"], True) == {"engine by server of new": (0, 1)}
    assert pairs_of(["new", "old"], True) == {
        "engine by server of new": (0, 2),
        "engine by engine of old": (0, 1),
        "server by server of old": (2, 3),
        "engine by server of old": (1, 3),
    }


def test_tree_has_a_process_and_all_below_it() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    try:
        while len(tree := read_tree(child.pid)) < 2:
            os.sched_yield()
        whole = read_tree(os.getpid())
    finally:
        for pid in sorted(tree, reverse=True):
            os.kill(pid, 15)
        child.wait()

    assert {use.name for use in tree.values()} <= {"sh", "sleep"}
    assert tree.keys() < whole.keys()
    assert whole[os.getpid()].processor_seconds > 0


def test_prompts_of_the_study_of_overload_never_repeat() -> None:
    first, other = prompts(1), prompts(2)

    assert len(set(first)) == len(first)
    assert set(first) == set(other)
    assert first != other


def test_goodput_is_the_median_of_the_shares_of_rounds() -> None:
    own = OwnLoad(0.2, None)
    rounds = (Overload(100.0, 400.0, n, {}, own) for n in (80.0, 20.0, 90.0))
    goodput = Goodput(timeout=1.0, rounds=tuple(rounds))

    assert (goodput.share, goodput.shares) == (0.8, (0.2, 0.8, 0.9))


def test_every_overload_is_held_against_the_closed_loops_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds = iter([1.0, 100.0, 200.0, 400.0])  # closed loops; the first warms up
    offered, asked = _scripted_sender(monkeypatch, speeds, late=iter([False, False]))

    goodput = measure_goodput(
        "a:1", "dates", times=4.0, timeout=1.0, concurrency=8, seconds=5.0, num_rounds=2
    )

    assert offered == [(2000, 2000, 400.0), (4000, 4000, 800.0)]
    assert [one.capacity for one in goodput.rounds] == [150.0, 300.0]
    assert goodput.shares == (120 / 300, 120 / 150)
    assert not goodput.invalid
    messages = [GenerateStreamRequest.FromString(data).request for data in asked]
    assert len({message.request_id for message in messages}) == len(messages)
    assert {message.model for message in messages} == {"dates"}
    assert all(len(message.inputs) == 1 for message in messages)


def test_an_overload_whose_sender_was_late_does_not_count_and_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _scripted_sender(monkeypatch, itertools.repeat(100.0), late=iter([True, False, True, False]))

    goodput = measure_goodput(
        "a:1", "dates", times=4.0, timeout=1.0, concurrency=8, seconds=5.0, num_rounds=2
    )

    assert (len(goodput.rounds), len(goodput.invalid)) == (2, 2)
    assert all(one.own.is_limit for one in goodput.invalid)

    _scripted_sender(monkeypatch, itertools.repeat(100.0), late=itertools.repeat(True))
    with pytest.raises(LoadTestError, match="the limit in 3 rounds, in the last one with 90% of"):
        measure_goodput(
            "a:1", "dates", times=4.0, timeout=1.0, concurrency=8, seconds=5.0, num_rounds=2
        )


def _scripted_sender(
    monkeypatch: pytest.MonkeyPatch, speeds: Iterator[float], late: Iterator[bool]
) -> tuple[list[tuple[int, int, float]], list[bytes]]:
    """Put one in place with known loops; return what it offers, and is asked in closed ones."""
    offered: list[tuple[int, int, float]] = []
    asked: list[bytes] = []

    class Sender:
        def __init__(self, address: str, method: str, timeout: float) -> None:
            pass

        def closed_loop(self, requests: Sequence[bytes], concurrency: int) -> Any:
            asked.extend(requests)
            return Namespace(answered_per_second=next(speeds))

        def open_loop(self, requests: Sequence[bytes], times: Sequence[float]) -> Any:
            offered.append((len(requests), len(times), round(len(times) / times[-1], -2)))
            ends = ((0.5, 1.0), (0.5, 4.9), (0.5, 0.9), (0.5, 5.1), (1.1, 3.0))
            own = OwnLoad(0.9 if next(late) else 0.2, None)
            calls = [Namespace(ok=True, end_to_end=one, finished=end) for one, end in ends]
            return Namespace(calls=calls * 240, own=own)

        def close(self) -> None:
            pass

    monkeypatch.setattr("loadtest.lab.overload.LightSender", Sender)

    return offered, asked


def test_sides_do_the_same_work_in_turns_and_each_is_first_as_often() -> None:
    asked: list[tuple[str, int]] = []

    class FakeSide:
        def __init__(self, name: str) -> None:
            self.name = name

        def do(self, num_streams: int, number: int, work: BenchmarkWork) -> Turn:
            asked.append((self.name, number))
            return Turn(float(number), 0.0)

    new, old = take_turns([FakeSide("new"), FakeSide("old")], 8, BenchmarkWork(), seconds=0.0)

    assert asked == [("new", 0), ("old", 0), ("old", 1), ("new", 1)]
    assert new == old == [Turn(1.0, 0.0)], "the first one warms up"


def test_turns_of_all_starts_count_and_each_start_is_told() -> None:
    starts = [
        [[Turn(1.0, 1.0)] * 3, [Turn(2.0, 1.0)] * 3],
        [[Turn(3.0, 1.0)], [Turn(2.0, 1.0)]],
    ]

    result = result_of(8, {"engine by engine of old": (0, 1)}, starts)

    assert (result["streams"], result["turns"], result["processor_seconds"]) == (8, 4, 1.0)
    assert result["ratios"] == {
        "engine by engine of old": {
            "processor": pytest.approx(0.75**0.5),
            "processor_by_start": [asdict(Ratio(r, r, r)) for r in (0.5, 1.5)],
            "wall": pytest.approx(1.0),
            "wall_by_start": [asdict(Ratio(1.0, 1.0, 1.0))] * 2,
        }
    }


def test_neighbours_are_compared_turn_by_turn() -> None:
    assert ratio_of([90, 99, 40], [100, 100, 50]) == Ratio(0.9, 0.8, 0.99)


def test_this_tree_is_held_against_another(tmp_path: Path) -> None:
    package, tree, out = str(tiny_package(tmp_path)), str(ROOT), tmp_path / "regression"
    options = ["--prompt-tokens", "6", "--new-tokens", "3", "--streams", "1,2", "--seconds", "0"]

    done = CliRunner().invoke(
        regression.main, [package, "--against", tree, package, *options, "--out", str(out)]
    )

    assert done.exit_code == 0, done.output
    result = json.loads(out.with_suffix(".json").read_text())
    assert [(one["streams"], one["turns"]) for one in result["results"]] == [(1, 1), (2, 1)]


def test_regression_with_nothing_to_compare_says_what_is_missing(tmp_path: Path) -> None:
    done = CliRunner().invoke(regression.main, [str(tmp_path), "--out", str(tmp_path / "r")])

    assert done.exit_code == 2 and "give --against, --served or both" in done.output


def test_a_tree_that_cannot_read_its_package_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(LoadTestError, match=f"give a package that this tree can .*{tmp_path}"),
        engine_of(Tree(ROOT, tmp_path), Limits(1, 1)),
    ):
        pass
    assert "PackageError" in capfd.readouterr().err


def test_what_more_tokens_cost_is_told_apart_from_what_requests_cost() -> None:
    short, long = Used(40, 10, {"worker": 3.0}), Used(120, 30, {"worker": 7.0})

    assert costs_of(short, long, num_requests=10) == {"worker": Cost(50_000, 200_000, 100_000)}


@pytest.mark.parametrize("stage", STAGES)
async def test_every_stage_of_the_overhead_answers_in_the_messages_asked_for(stage: str) -> None:
    async with served(stage, 2, 0.001) as do:
        used = await do(Work(2, 2, num_tokens=8, tokens_per_message=4))

    assert used.num_tokens == 16
    assert 0 < used.num_messages <= 4
    assert all(seconds > 0 for seconds in used.processor.values())


@pytest.mark.parametrize("stage", STAGES)
def test_a_first_token_is_later_at_the_client_than_from_the_engine(stage: str) -> None:
    first = measure_first_token(None, 2, 8, stage)

    assert (first.model, first.stage) == ("stand-in", stage)
    assert (first.num_streams, first.num_requests) == (2, 8)
    assert 0 < first.engine < first.client
    assert 0 < first.added <= first.added_p90


def test_a_request_without_a_token_has_no_time_to_it() -> None:
    with pytest.raises(LoadTestError, match="1 of 1 requests had no token"):
        first_token_of("dates", "gateway", 1, [RequestRecord(0, 0, 0.0, 0.0, 1.0, "UNAVAILABLE")])
