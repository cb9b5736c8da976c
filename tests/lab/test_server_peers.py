"""The comparison of servers on scripted ones: who runs when, what is asked, what is written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from tokenweir.v1 import generation_service_pb2 as pb

from engine.requests.events import Admitted, TextDelta
from loadtest.errors import LoadTestError
from loadtest.lab.peers.command import main
from loadtest.lab.peers.comparison import Agreement, Plan
from loadtest.lab.peers.process import WorkerError
from loadtest.lab.peers.server_comparison import ServerComparison, compare_servers
from loadtest.lab.peers.server_process import Answered, Loop, ServerProcess
from loadtest.lab.peers.server_results import (
    ServerResults,
    summarize_servers,
    to_markdown,
    write_server_results,
)
from loadtest.lab.peers.servers import llama_server, ray_ingress, tokenweir_serve
from loadtest.lab.peers.servers.ctranslate_grpc import Batches, Told
from loadtest.lab.peers.servers.token_stream import stream
from loadtest.lab.peers.worker import LoadOptions
from loadtest.lab.peers.works import WORKS, Engine, Work
from loadtest.metrics import distribution
from server.cli.service import serve as serve_command

OURS = Engine("tokenweir serve fp32", "ours", "fp32")
PEER = Engine("peer fp32", "peer", "fp32", OURS.name, must_agree=True)
OPTIONS = LoadOptions("models", "fp32", 2, 4, 20, 1, {})
LOOP = Loop(2, 4, 5, 3, 11, seed=7)


def seconds(value: float) -> Any:
    return distribution([value])


class FakeServers:
    """Starts servers that answer as slowly as their setting says, and remembers them."""

    def __init__(self, broken: str = "", interrupted_at: int = 0) -> None:
        self.log: list[tuple[str, dict[str, int], Loop]] = []
        self.running: list[str] = []
        self.most_running = 0
        self._broken = broken
        self._interrupted_at = interrupted_at

    @contextmanager
    def __call__(self, engine: Engine, options: LoadOptions) -> Iterator[Any]:
        if engine.name == self._broken:
            raise WorkerError("not installed")
        self.running.append(engine.name)
        self.most_running = max(self.most_running, len(self.running))
        setting = dict(options.setting)

        def ask(loop: Loop) -> Answered:
            self.log.append((engine.name, setting, loop))
            if len(self.log) == self._interrupted_at:
                raise KeyboardInterrupt
            if setting.get("crashes"):
                raise WorkerError("1 of 4 requests failed")
            pace = setting.get(f"at {loop.concurrency}", 2 if engine is OURS else 3)
            tokens = [loop.seed, 0 if engine.weights == "fp32" else 1]
            answers = tuple({"text": "", "token_ids": list(tokens)} for _ in range(3))
            late = ("late",) if engine is PEER and loop.concurrency == 2 else ()
            times = (seconds(pace / 10), seconds(pace / 100), seconds(pace))
            return Answered(pace * loop.num_requests, *times, answers, 0.1, late)

        try:
            yield SimpleNamespace(versions={engine.adapter: "1.0"}, ask=ask)
        finally:
            self.running.remove(engine.name)


def plan(*engines: Engine, **options: Any) -> Plan:
    work = Work("tiny-servers", "gpt2", 4, 3, engines or (OURS, PEER), are_servers=True)
    values: dict[str, Any] = {
        "concurrencies": (1, 2),
        "num_rounds": 2,
        "num_threads": 1,
        "vocab_size": 11,
        "directory": Path("models"),
    }
    return Plan(work=work, **{**values, **options})


def run_comparison(chosen: Plan, servers: FakeServers) -> ServerComparison:
    return compare_servers(chosen, servers, lambda text: None)


def test_servers_take_turns_alone_and_every_round_begins_with_another():
    servers = FakeServers()

    found = run_comparison(plan(concurrencies=(2,)), servers)

    order = [(0, OURS.name), (0, PEER.name), (1, PEER.name), (1, OURS.name)]
    assert [(run.round, run.engine) for run in found.runs] == order
    assert servers.most_running == 1 and not servers.running


def test_all_servers_are_asked_the_same_and_nothing_twice():
    servers = FakeServers()
    run_comparison(plan(), servers)

    loops = {
        one.name: [loop for name, _, loop in servers.log if name == one.name and loop.seed]
        for one in (OURS, PEER)
    }
    whole = [loop for loop in loops[OURS.name] if loop.num_new_tokens == 3]
    assert sorted(map(repr, loops[OURS.name])) == sorted(map(repr, loops[PEER.name]))
    assert [loop.concurrency for loop in whole] == [1, 2, 1, 2]
    assert len({loop.seed for loop in whole}) == 4
    assert {loop.num_requests for loop in whole} == {4}


def test_the_fastest_setting_is_taken_for_each_number_of_streams():
    one, other = {"at 1": 1, "at 2": 9}, {"at 1": 9, "at 2": 1}

    found = run_comparison(plan(OURS, replace(PEER, settings=(one, other))), FakeServers())

    chosen = {run.concurrency: run.setting for run in found.runs if run.engine == PEER.name}
    assert chosen == {1: one, 2: other}
    assert all(run.round >= 0 for run in found.runs)


def test_a_server_that_is_not_there_is_named_and_the_others_run():
    found = run_comparison(plan(), FakeServers(broken=PEER.name))

    assert found.missing == {PEER.name: "not installed"}
    assert {run.engine for run in found.runs} == {OURS.name}


def test_a_setting_with_which_requests_fail_is_named_and_another_taken():
    settings = ({"crashes": 1}, {"at 1": 5, "at 2": 5})

    found = run_comparison(plan(OURS, replace(PEER, settings=settings)), FakeServers())

    assert found.missing == {"peer fp32 {'crashes': 1}": "1 of 4 requests failed"}
    assert {run.setting["at 1"] for run in found.runs if run.engine == PEER.name} == {5}


def test_what_was_measured_before_ctrl_c_is_kept():
    servers = FakeServers(interrupted_at=6)  # in the turn of the second: warm-up, 1, 2

    found = run_comparison(plan(), servers)

    assert [(run.engine, run.concurrency) for run in found.runs] == [
        (OURS.name, 1),
        (OURS.name, 2),
        (PEER.name, 1),
    ]
    assert not servers.running


def test_answers_are_compared_with_those_of_ours():
    other = Engine("peer int8", "peer", "int8", OURS.name)

    found = run_comparison(plan(OURS, PEER, other, concurrencies=(2,)), FakeServers())

    assert found.agreements == (
        Agreement(PEER.name, OURS.name, 2, True, 6, 6),
        Agreement(other.name, OURS.name, 2, False, 0, 6),
    )


def results_of(comparison: ServerComparison) -> ServerResults:
    return ServerResults(
        work=plan().work,
        command="python -m loadtest.lab.peers",
        commit="c0ffee",
        started_at="now",
        machine="a machine, 2 cores",
        num_threads=2,
        lines=summarize_servers(plan().work, comparison),
        disagreements=("peer fp32 at concurrency 1: 0 of 2",),
        comparison=comparison,
    )


def test_ratios_are_theirs_over_ours_and_late_runs_are_told():
    text = to_markdown(results_of(run_comparison(plan(), FakeServers())))

    row = "| 2 | peer fp32 | 1.0 | 300, 300 | 30.0 | tokenweir serve fp32 | 1.50 (1.50 - 1.50) |"
    assert f"{row} 1.50 | 1.50 |" in text
    assert "- peer fp32 at 2: the load test was late in 2 of 2 runs" in text
    assert "- DISAGREES: peer fp32 at concurrency 1: 0 of 2" in text
    assert "\n- command: `python -m loadtest.lab.peers`\n- versions: ours 1.0, peer 1.0" in text


def test_everything_measured_is_kept(tmp_path: Path):
    found = run_comparison(plan(), FakeServers())

    json_file, markdown = write_server_results(results_of(found), tmp_path / "results")

    kept = json.loads(json_file.read_text())
    assert len(kept["comparison"]["runs"]) == len(found.runs) == 8
    assert kept["commit"] == "c0ffee" and markdown.name == "tiny-servers.md"


def test_a_name_that_no_engine_holds_is_an_error():
    work = WORKS["gpt2-servers"]

    assert {one.name for one in work.of(("llama",)).engines} == {
        "llama-server f32",
        "llama-server q8_0",
    }
    assert work.of(()) is work
    with pytest.raises(LoadTestError, match="no engine of gpt2 is called 'vllm'; known: tokenweir"):
        WORKS["gpt2"].of(("tokenweir", "vllm"))


def test_the_command_refuses_such_a_name_before_it_makes_models(tmp_path: Path):
    arguments = ["--work", "gpt2-servers", "--engine", "vllm", "--out", str(tmp_path / "out")]

    found = CliRunner().invoke(main, [*arguments, "--models", str(tmp_path / "models")])

    assert found.exit_code == 2 and "is called 'vllm'; known: tokenweir serve" in found.output
    assert not list(tmp_path.iterdir())


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ServerProcess]]:
    """Start the server of fake_server.py."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    started: list[ServerProcess] = []

    def make(**options: Any) -> ServerProcess:
        log = tmp_path / "servers.log"
        started.append(ServerProcess("tests.lab.fake_server", replace(OPTIONS, **options), log))
        return started[-1]

    yield make
    for server in started:
        server.close()


def test_a_server_is_asked_by_the_load_test(start: Callable[..., ServerProcess]):
    server = start()

    found, again = server.ask(LOOP), server.ask(LOOP)

    ids = [answer["token_ids"] for answer in found.answers]
    assert len(ids) == 4 and all(one == [one[0], one[0] + 1, one[0] + 2] for one in ids)  # type: ignore[index, operator]
    assert found.seconds > 0 and found.time_to_first_token and found.time_per_output_token
    assert again.answers == found.answers
    assert server.versions == {"counting": "1.0"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"short": 1}, r"asked for 3 tokens, got \[2\]"),
        ({"fails": 1}, r"4 of 4 requests failed: UNKNOWN .*the engine is broken"),
    ],
)
def test_answers_that_are_none_are_an_error(
    start: Callable[..., ServerProcess], setting: dict[str, int], message: str
):
    server = start(setting=setting)

    with pytest.raises(WorkerError, match=message):
        server.ask(LOOP)


def test_a_server_that_ends_by_itself_says_where_its_log_is(
    start: Callable[..., ServerProcess], tmp_path: Path
):
    with pytest.raises(WorkerError, match="the server has ended by itself; its log is .*servers"):
        start(setting={"ends": 1})
    assert "this server has nothing to serve" in (tmp_path / "servers.log").read_text()


def test_a_server_that_is_not_installed_says_so(start: Callable[..., ServerProcess]):
    with pytest.raises(WorkerError, match="FileNotFoundError: no such weights"):
        start(weights="lost")


async def tokens(batches: Batches, prompt: Sequence[int], num_new: int = 2) -> list[int]:
    return [token async for some in batches.generate(prompt, num_new) for token in some]


async def gathered(*asks: tuple[list[int], int], max_batch: int = 8) -> tuple[list[Any], list[int]]:
    """Return the answers to requests that are sent at once, and the sizes of batches."""
    sizes: list[int] = []

    def count(prompts: Sequence[Sequence[int]], num_new: int, tell: Told) -> None:
        sizes.append(len(prompts))
        if prompts[0][0] < 0:
            raise RuntimeError("no token is negative")
        for step in range(num_new):
            for place, prompt in enumerate(prompts):
                tell(place, prompt[-1] + step + 1)

    batches = Batches(count, max_batch, pause=0.01)
    runner = asyncio.create_task(batches.run_forever())
    asked = (tokens(batches, *ask) for ask in asks)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    runner.cancel()
    return answers, sizes


async def test_requests_that_wait_are_one_batch_and_each_gets_its_own_tokens():
    answers, sizes = await gathered(([1], 2), ([5], 2), ([9], 2))

    assert answers == [[2, 3], [6, 7], [10, 11]]
    assert sizes == [3]


async def test_a_batch_has_no_more_than_its_most():
    _, sizes = await gathered(*[([1], 2)] * 5, max_batch=2)

    assert sizes == [2, 2, 1]


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        ([([-1], 2), ([3], 2)], "no token is negative"),
        ([([1], 2), ([3], 4)], "the same length"),
    ],
)
async def test_what_a_batch_fails_with_reaches_all_of_it(asks: list[Any], message: str):
    answers, _ = await gathered(*asks)

    assert [message in str(answer) for answer in answers] == [True, True]


def stream_request(ids: list[int], max_new_tokens: int) -> pb.GenerateStreamRequest:
    request = pb.GenerateStreamRequest()
    request.request.inputs.add().tokens.ids.extend(ids)
    request.request.stopping.max_new_tokens = max_new_tokens
    return request


@pytest.mark.parametrize(("ids", "num_new"), [([], 3), ([1], 0)])
async def test_a_stream_needs_token_ids_and_a_length(ids: list[int], num_new: int):
    async def generate(prompt: Sequence[int], num: int) -> AsyncIterator[Sequence[int]]:
        yield prompt

    with pytest.raises(ValueError, match="give token ids, and max_new_tokens"):
        await anext(stream(stream_request(ids, num_new), generate))


async def test_the_ingress_of_ray_serve_streams_what_the_engine_gives(
    monkeypatch: pytest.MonkeyPatch,
):
    class FakeEngine:
        num_starts = 0

        async def start(self) -> None:
            self.num_starts += 1

        async def generate(self, request: Any) -> AsyncIterator[Any]:
            assert request.params.ignore_eos and request.params.max_new_tokens == 3
            yield Admitted(request.request_id)
            for token in request.prompt:
                yield TextDelta(0, "", (token,))

    engine = FakeEngine()
    monkeypatch.setattr(ray_ingress, "engine_of", lambda options: engine)
    ingress = ray_ingress.Ingress(OPTIONS)

    for _ in range(2):
        messages = [one async for one in ingress.GenerateStream(stream_request([7, 8, 9], 3))]

    assert [list(one.delta.tokens.ids) for one in messages[:3]] == [[7], [8], [9]]
    assert [one.WhichOneof("event") for one in messages[3:]] == ["finished", "summary"]
    assert messages[4].summary.usage.output_tokens == 3
    assert engine.num_starts == 1


def test_our_own_server_is_started_with_options_that_it_has():
    command = tokenweir_serve.launch(OPTIONS, 4321).command

    context = serve_command.make_context("serve", list(command[4:]))
    assert (context.params["port"], context.params["threads"]) == (4321, 2)
    assert context.params["max_num_seqs"] == 4


def test_llama_server_has_a_place_for_every_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho 'version: 7 (abc)' >&2\n")
    binary.chmod(0o755)
    monkeypatch.setenv("LLAMA_SERVER", str(binary))

    found = llama_server.launch(replace(OPTIONS, weights="f32", max_tokens=300), 4321)

    command = " ".join(found.command)
    assert f"{binary} --offline" in command and "--parallel 4 --ctx-size 2048" in command
    assert "--cache-type-k f32" in command and "--no-repack" not in command
    assert found.address == "http://127.0.0.1:4321/v1"
    assert found.versions == {"llama.cpp": "7 (abc)"}


def test_without_llama_server_it_is_said_how_it_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", "")

    with pytest.raises(FileNotFoundError, match="set LLAMA_SERVER to it"):
        llama_server.launch(OPTIONS, 4321)
