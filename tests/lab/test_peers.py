"""The comparison of engines and servers on scripted ones: who runs when, what is asked and kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tokenweir.v1 import generation_service_pb2 as pb

from engine.requests.events import Admitted, TextDelta
from loadtest.errors import LoadTestError
from loadtest.lab.peers.chart import write_png
from loadtest.lab.peers.command import main
from loadtest.lab.peers.comparison import (
    Agreement,
    Answered,
    Comparison,
    Loop,
    Plan,
    Run,
    compare,
)
from loadtest.lab.peers.engine_process import EngineProcess
from loadtest.lab.peers.results import disagreements, summarize, told
from loadtest.lab.peers.server_process import ServerProcess
from loadtest.lab.peers.servers import llama_server, ray_ingress, tokenweir_serve
from loadtest.lab.peers.servers.ctranslate_grpc import Batches, Told
from loadtest.lab.peers.servers.token_stream import stream
from loadtest.lab.peers.worker import LoadOptions
from loadtest.lab.peers.works import WORKS, Engine, Work
from loadtest.lab.result import write_result
from loadtest.lab.turns import Ratio
from server.cli.serving.service import serve as serve_command

pytestmark = pytest.mark.long

OURS = Engine("tokenweir fp32", "tokenweir", "fp32")
PEER = Engine("peer fp32", "peer", "fp32", OURS.name, must_agree=True)
OPTIONS = LoadOptions("models", "fp32", 2, 4, 20, 1, {})
LOOP = Loop(2, 4, 5, 3, 11, seed=7)
KINDS = pytest.mark.parametrize("are_servers", [False, True], ids=["engines", "servers"])


class FakePeer:
    """Answers as slowly as its setting says, with tokens of its weights."""

    def __init__(self, fakes: FakePeers, engine: Engine, setting: Mapping[str, int]) -> None:
        self.versions = {engine.adapter: "1.0"}
        self._fakes, self._engine, self._setting = fakes, engine, setting
        fakes.running.append(engine.name)
        fakes.most_running = max(fakes.most_running, len(fakes.running))

    def ask(self, loop: Loop) -> Answered:
        engine, setting = self._engine, self._setting
        self._fakes.log.append((engine.name, loop))
        if len(self._fakes.log) == self._fakes.interrupted_at:
            raise KeyboardInterrupt
        if setting.get("crashes"):
            raise LoadTestError("segmentation fault")
        pace = setting.get(f"at {loop.concurrency}", 2 if engine is OURS else 3)
        tokens = [loop.seed, 0 if engine.weights == "fp32" else 1]
        answers = tuple({"text": "", "token_ids": list(tokens)} for _ in range(3))
        late = ("late",) if engine is PEER and loop.concurrency == 2 else ()
        whole = pace * loop.num_requests
        return Answered(whole, pace / 10, pace / 100, answers, pace / 5, late)

    def close(self) -> None:
        self._fakes.running.remove(self._engine.name)


class FakePeers:
    """Starts fake peers and remembers them."""

    def __init__(self, missing: str = "", interrupted_at: int = 0) -> None:
        self.log: list[tuple[str, Loop]] = []
        self.running: list[str] = []
        self.most_running = self.num_started = 0
        self.interrupted_at = interrupted_at
        self._missing = missing

    def __call__(self, engine: Engine, options: LoadOptions) -> FakePeer:
        if engine.name == self._missing:
            raise LoadTestError("not installed")
        self.num_started += 1
        return FakePeer(self, engine, options.setting)


def plan(*engines: Engine, are_servers: bool = False, **options: Any) -> Plan:
    work = Work("tiny", "gpt2", 4, 3, engines or (OURS, PEER), are_servers=are_servers)
    values: dict[str, Any] = {
        "concurrencies": (1, 2),
        "num_rounds": 2,
        "num_threads": 1,
        "vocab_size": 11,
        "directory": Path("models"),
    }
    return Plan(work=work, **{**values, **options})


def run_comparison(chosen: Plan, peers: FakePeers) -> Comparison:
    return compare(chosen, peers, lambda text: None, pause=0)


@KINDS
def test_they_take_turns_and_every_round_begins_with_another(are_servers: bool) -> None:
    peers = FakePeers()

    found = run_comparison(plan(concurrencies=(2,), are_servers=are_servers), peers)

    order = [(0, OURS.name), (0, PEER.name), (1, PEER.name), (1, OURS.name)]
    assert [(run.round, run.engine) for run in found.runs] == order
    assert not peers.running
    # Engines stay loaded, servers are alone and started anew.
    assert (peers.most_running, peers.num_started) == ((1, 4) if are_servers else (2, 2))


def test_all_are_asked_the_same_and_nothing_twice() -> None:
    peers = FakePeers()
    run_comparison(plan(), peers)

    loops = {
        one.name: [loop for name, loop in peers.log if name == one.name] for one in (OURS, PEER)
    }
    whole = [loop for loop in loops[OURS.name] if loop.num_new_tokens == 3]
    assert sorted(map(repr, loops[OURS.name])) == sorted(map(repr, loops[PEER.name]))
    assert [loop.concurrency for loop in whole] == [1, 2, 1, 2]
    assert len({loop.seed for loop in loops[OURS.name]}) == len(loops[OURS.name])
    assert {loop.num_requests for loop in whole} == {4}


def test_the_fastest_setting_is_taken_for_each_number_of_streams() -> None:
    one, other = {"at 1": 1, "at 2": 9}, {"at 1": 9, "at 2": 1}

    found = run_comparison(plan(OURS, replace(PEER, settings=(one, other))), FakePeers())

    chosen = {run.concurrency: run.setting for run in found.runs if run.engine == PEER.name}
    assert chosen == {1: one, 2: other}
    assert all(run.round >= 0 for run in found.runs)


@KINDS
def test_one_that_is_not_there_is_named_and_the_others_run(are_servers: bool) -> None:
    found = run_comparison(plan(are_servers=are_servers), FakePeers(missing=PEER.name))

    assert found.missing == {PEER.name: "not installed"}
    assert {run.engine for run in found.runs} == {OURS.name}


def test_a_setting_that_crashes_is_named_and_another_taken() -> None:
    settings = ({"crashes": 1}, {"at 1": 5, "at 2": 5})

    found = run_comparison(plan(OURS, replace(PEER, settings=settings)), FakePeers())

    assert found.missing == {"peer fp32 {'crashes': 1}": "segmentation fault"}
    assert {run.setting["at 1"] for run in found.runs if run.engine == PEER.name} == {5}


def test_one_that_crashes_with_every_setting_is_left_out() -> None:
    crashing = replace(PEER, settings=({"crashes": 1},))

    found = run_comparison(plan(OURS, crashing), FakePeers())

    assert {run.engine for run in found.runs} == {OURS.name}


def test_an_engine_is_left_out_beyond_its_largest_concurrency() -> None:
    found = run_comparison(plan(OURS, replace(PEER, max_concurrency=1)), FakePeers())

    assert {run.concurrency for run in found.runs if run.engine == PEER.name} == {1}


@KINDS
def test_what_was_measured_before_ctrl_c_is_kept(are_servers: bool) -> None:
    peers = FakePeers(interrupted_at=6)  # in the turn of the second: warm-up, 1, 2

    found = run_comparison(plan(are_servers=are_servers), peers)

    measured = [(OURS.name, 1), (OURS.name, 2), (PEER.name, 1)]
    assert [(run.engine, run.concurrency) for run in found.runs] == measured
    assert not peers.running


def test_every_engine_is_closed_even_after_a_failure() -> None:
    peers = FakePeers()

    def fail(text: str) -> None:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError):
        compare(plan(), peers, fail, pause=0)

    assert peers.num_started == 1 and not peers.running


def test_answers_are_compared_with_those_of_ours() -> None:
    other = Engine("peer int8", "peer", "int8", OURS.name)

    found = run_comparison(plan(OURS, PEER, other, concurrencies=(2,)), FakePeers())

    assert found.agreements == (
        Agreement(PEER.name, OURS.name, 2, True, 6, 6),
        Agreement(other.name, OURS.name, 2, False, 0, 6),
    )


def test_only_engines_that_must_agree_are_reported_as_disagreeing() -> None:
    must, may = Agreement("a", "ours", 8, True, 30, 40), Agreement("b", "ours", 8, False, 0, 40)

    assert disagreements([must, may]) == ("a at concurrency 8: 30 of 40 outputs are those of ours",)
    assert disagreements([replace(must, equal=40)]) == ()


def test_ratios_are_those_of_each_round() -> None:
    def run(engine: str, number: int, seconds: float) -> Run:
        return Run(engine, 1, number, {}, seconds, 3 / seconds, seconds / 2, None, None, ())

    times = {OURS.name: (2.0, 4.0, 2.0), PEER.name: (4.0, 6.0, 8.0)}
    runs = tuple(run(name, n, t) for name, of in times.items() for n, t in enumerate(of))

    ours, peer = summarize(plan().work, Comparison(runs, (), {}, {}))

    assert ours.ratio is None
    assert peer.ratio == peer.first_token_ratio == Ratio(2.0, 1.5, 4.0)
    assert peer.output_token_ratio is None
    assert peer.tokens_per_second == 3 / 6


def test_a_line_tells_the_ratio_and_late_runs() -> None:
    lines = summarize(plan().work, run_comparison(plan(), FakePeers()))

    assert [told(line) for line in lines if line.concurrency == 2] == [
        "tokenweir fp32 at 2: 1.5 tokens/s",
        "peer fp32 at 2: 1.0 tokens/s, 1.50 (1.50 - 1.50) of the time of tokenweir fp32"
        "; the load test was late in 2 of 2 runs",
    ]


def test_a_picture_is_drawn_of_what_is_kept(tmp_path: Path) -> None:
    work, found = plan().work, run_comparison(plan(), FakePeers())
    lines = [asdict(line) for line in summarize(work, found)]
    content = {"work": asdict(work), "num_threads": 2, "lines": lines}

    write_png(write_result(content, tmp_path / "tiny"), tmp_path / "tiny.png")

    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", WORKS)
def test_every_peer_is_compared_with_an_engine_of_the_same_work(name: str) -> None:
    engines = {engine.name: engine for engine in WORKS[name].engines}

    for engine in engines.values():
        assert engine.against is None or engines[engine.against].against is None


def test_a_name_that_no_engine_holds_is_an_error() -> None:
    work = WORKS["gpt2-servers"]

    assert {one.name for one in work.of(("llama",)).engines} == {
        "llama-server f32",
        "llama-server q8_0",
    }
    assert work.of(()) is work
    with pytest.raises(LoadTestError, match="no engine of gpt2 is called 'vllm'; known: tokenweir"):
        WORKS["gpt2"].of(("tokenweir", "vllm"))


def test_the_command_refuses_such_a_name_before_it_makes_models(tmp_path: Path) -> None:
    arguments = ["--work", "gpt2-servers", "--engine", "vllm", "--out", str(tmp_path / "out")]

    found = CliRunner().invoke(main, [*arguments, "--models", str(tmp_path / "models")])

    assert found.exit_code == 2 and "is called 'vllm'; known: tokenweir serve" in found.output
    assert not list(tmp_path.iterdir())


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Start a process with the adapter of fake_peer.py, or the server of fake_server.py."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    started: list[EngineProcess | ServerProcess] = []

    def make(kind: type[EngineProcess | ServerProcess], **options: Any) -> Any:
        name = f"tests.fakes.fake_{'peer' if kind is EngineProcess else 'server'}"
        started.append(kind(name, replace(OPTIONS, **options), tmp_path / "peers.log"))
        return started[-1]

    yield make
    for peer in started:
        peer.close()


PROCESSES = pytest.mark.parametrize("kind", [EngineProcess, ServerProcess])


@PROCESSES
def test_a_process_is_asked_for_the_same_by_the_same_loop(
    start: Callable[..., Any], kind: type[EngineProcess | ServerProcess]
) -> None:
    peer = start(kind)

    found, again = peer.ask(LOOP), peer.ask(LOOP)

    ids = [answer["token_ids"] for answer in found.answers]
    assert len(ids) == 4 and all(one == [one[0], one[0] + 1, one[0] + 2] for one in ids)
    assert found.seconds > 0 and found.first_token > 0 and found.output_token is not None
    assert again.answers == found.answers
    assert peer.versions == {"counting": "1.0"}


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        (ServerProcess, {"short": 1}, r"asked for 3 tokens, got \[2\]"),
        (ServerProcess, {"fails": 1}, r"4 of 4 requests failed: UNKNOWN .*the engine is broken"),
        (EngineProcess, {"short": 1}, r"asked for 2 times 1 tokens, got 2 times \[0\]"),
        (EngineProcess, {"fails": 1}, "ValueError: the engine is broken"),
    ],
)
def test_answers_that_are_none_are_an_error(
    start: Callable[..., Any], kind: Any, setting: dict[str, int], message: str
) -> None:
    peer = start(kind, setting=setting)

    with pytest.raises(LoadTestError, match=message):
        peer.ask(LOOP)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ServerProcess, "the server has ended by itself; its log is .*peers.log"),
        (EngineProcess, "a process has ended by itself; its log is .*peers.log"),
    ],
)
def test_a_process_that_ends_by_itself_says_where_its_log_is(
    start: Callable[..., Any], kind: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadTestError, match=message):
        start(kind, setting={"ends": 1})

    assert "nothing to do" in (tmp_path / "peers.log").read_text()


@PROCESSES
def test_what_is_not_installed_says_so(start: Callable[..., Any], kind: Any) -> None:
    with pytest.raises(LoadTestError, match="FileNotFoundError: no such weights"):
        start(kind, weights="lost")


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


async def test_requests_that_wait_are_one_batch_and_each_gets_its_own_tokens() -> None:
    answers, sizes = await gathered(([1], 2), ([5], 2), ([9], 2))

    assert answers == [[2, 3], [6, 7], [10, 11]]
    assert sizes == [3]


async def test_a_batch_has_no_more_than_its_most() -> None:
    _, sizes = await gathered(*[([1], 2)] * 5, max_batch=2)

    assert sizes == [2, 2, 1]


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        ([([-1], 2), ([3], 2)], "no token is negative"),
        ([([1], 2), ([3], 4)], "the same length"),
    ],
)
async def test_what_a_batch_fails_with_reaches_all_of_it(asks: list[Any], message: str) -> None:
    answers, _ = await gathered(*asks)

    assert [message in str(answer) for answer in answers] == [True, True]


def stream_request(ids: list[int], max_new_tokens: int) -> pb.GenerateStreamRequest:
    request = pb.GenerateStreamRequest()
    request.request.inputs.add().tokens.ids.extend(ids)
    request.request.stopping.max_new_tokens = max_new_tokens
    return request


@pytest.mark.parametrize(("ids", "num_new"), [([], 3), ([1], 0)])
async def test_a_stream_needs_token_ids_and_a_length(ids: list[int], num_new: int) -> None:
    async def generate(prompt: Sequence[int], num: int) -> AsyncIterator[Sequence[int]]:
        yield prompt

    with pytest.raises(ValueError, match="give token ids, and max_new_tokens"):
        await anext(stream(stream_request(ids, num_new), generate))


async def test_the_ingress_of_ray_serve_streams_what_the_engine_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeEngine:
        num_starts = 0

        async def start(self) -> None:
            self.num_starts += 1

        async def generate(self, request: Any) -> AsyncIterator[Any]:
            assert request.params.ignore_eos and request.params.max_new_tokens == 3
            yield Admitted(request.request_id, 1)
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


def test_our_own_server_is_started_with_options_that_it_has() -> None:
    command = tokenweir_serve.launch(OPTIONS, 4321).command

    context = serve_command.make_context("serve", list(command[4:]))
    assert (context.params["listen__port"], context.params["engine__num_threads"]) == (4321, 2)
    assert context.params["engine__max_num_seqs"] == 4


def test_llama_server_has_a_place_for_every_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_without_llama_server_it_is_said_how_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", "")

    with pytest.raises(FileNotFoundError, match="set LLAMA_SERVER to it"):
        llama_server.launch(OPTIONS, 4321)
