"""The comparison of engines on fakes: who runs when, what is compared, what is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.lab.peers.chart import write_png
from loadtest.lab.peers.comparison import Agreement, Comparison, Plan, Run, compare, prompts_of
from loadtest.lab.peers.process import Sample, WorkerError, WorkerProcess
from loadtest.lab.peers.results import Results, disagreements, summarize, to_markdown, write
from loadtest.lab.peers.worker import LoadOptions, Prompts
from loadtest.lab.peers.works import WORKS, Engine, Work

OURS = Engine("tokenweir fp32", "tokenweir", "fp32")
PEER = Engine("peer fp32", "peer", "fp32", OURS.name, must_agree=True)
OPTIONS = LoadOptions("models", "fp32", 1, 4, 20, 1, {})


class FakeWorker:
    """An engine whose runs take as long as its name says, and whose tokens are made up."""

    def __init__(self, engine: Engine, setting: Mapping[str, int], log: list[Any]) -> None:
        self.versions = {engine.adapter: "1.0"}
        self._engine, self._setting, self._log = engine, setting, log
        self.is_closed = False

    def generate(self, prompts: Prompts, num_new_tokens: int) -> Sample:
        self._log.append((self._engine.name, len(prompts), num_new_tokens, prompts))
        if self._setting.get("crashes"):
            raise WorkerError("segmentation fault")
        seconds = self._setting.get("seconds", 2 if self._engine is OURS else 3) * num_new_tokens
        last = 0 if self._engine.weights == "fp32" else 1
        return Sample(seconds, tuple((last,) * num_new_tokens for _ in prompts))

    def cpu_seconds(self) -> float:
        return float(len(self._log))

    def close(self) -> None:
        self.is_closed = True


class Fleet:
    """Starts fake workers and remembers them."""

    def __init__(self, missing: str = "") -> None:
        self.log: list[Any] = []
        self.workers: list[FakeWorker] = []
        self._missing = missing

    def __call__(self, engine: Engine, options: LoadOptions) -> FakeWorker:
        if engine.name == self._missing:
            raise WorkerError("not installed")
        self.workers.append(FakeWorker(engine, options.setting, self.log))
        return self.workers[-1]


def plan(*engines: Engine, **options: Any) -> Plan:
    work = Work("tiny", "gpt2", 4, 3, engines or (OURS, PEER))
    values: dict[str, Any] = {
        "concurrencies": (1, 2),
        "num_rounds": 2,
        "num_threads": 1,
        "vocab_size": 11,
        "directory": Path("models"),
    }
    return Plan(work=work, **{**values, **options})


def run_comparison(chosen: Plan, fleet: Fleet) -> Comparison:
    return compare(chosen, fleet, lambda text: None, pause=0)


def test_engines_take_turns_and_every_round_begins_with_another() -> None:
    comparison = run_comparison(plan(concurrencies=(2,)), Fleet())

    assert [(run.round, run.engine) for run in comparison.runs] == [
        (0, OURS.name),
        (0, PEER.name),
        (1, PEER.name),
        (1, OURS.name),
    ]


def test_all_engines_get_the_same_prompts_and_no_prompt_comes_twice() -> None:
    fleet = Fleet()
    run_comparison(plan(concurrencies=(2,)), fleet)

    whole = {
        engine.name: [
            prompts for name, _, new, prompts in fleet.log if (name, new) == (engine.name, 3)
        ]
        for engine in (OURS, PEER)
    }
    assert sorted(whole[OURS.name]) == sorted(whole[PEER.name])
    of_ours = [
        prompt for name, _, _, prompts in fleet.log if name == OURS.name for prompt in prompts
    ]
    assert len({tuple(prompt) for prompt in of_ours}) == len(of_ours)


def test_prompts_have_the_length_and_vocabulary_of_the_work() -> None:
    prompts = prompts_of(plan(), 3, "0")

    assert [len(prompt) for prompt in prompts] == [4, 4, 4]
    assert all(0 <= token < 11 for prompt in prompts for token in prompt)
    assert prompts == prompts_of(plan(), 3, "0")


def test_the_fastest_setting_of_an_engine_is_taken() -> None:
    slow, fast = {"seconds": 5}, {"seconds": 1}

    comparison = run_comparison(plan(OURS, replace(PEER, settings=(slow, fast))), Fleet())

    assert {tuple(r.setting.items()) for r in comparison.runs if r.engine == PEER.name} == {
        (("seconds", 1),)
    }


def test_a_setting_that_crashes_is_named_and_another_taken() -> None:
    settings = ({"crashes": 1}, {"seconds": 5})

    comparison = run_comparison(
        plan(OURS, replace(PEER, settings=settings), concurrencies=(2,)), Fleet()
    )

    assert comparison.missing == {"peer fp32 {'crashes': 1}": "segmentation fault"}
    assert len([run for run in comparison.runs if run.engine == PEER.name]) == 2


def test_an_engine_that_crashes_with_every_setting_is_left_out() -> None:
    crashing = replace(PEER, settings=({"crashes": 1},))

    comparison = run_comparison(plan(OURS, crashing, concurrencies=(2,)), Fleet())

    assert {run.engine for run in comparison.runs} == {OURS.name}


def test_an_engine_that_cannot_be_loaded_is_named_and_the_others_run() -> None:
    comparison = run_comparison(plan(), Fleet(missing=PEER.name))

    assert comparison.missing == {PEER.name: "not installed"}
    assert {run.engine for run in comparison.runs} == {OURS.name}


def test_an_engine_is_left_out_beyond_its_largest_concurrency() -> None:
    comparison = run_comparison(plan(OURS, replace(PEER, max_concurrency=1)), Fleet())

    assert {run.concurrency for run in comparison.runs if run.engine == PEER.name} == {1}


def test_every_worker_is_closed_even_after_a_failure() -> None:
    fleet = Fleet()

    def fail(text: str) -> None:
        if text.startswith("round"):
            raise RuntimeError(text)

    with pytest.raises(RuntimeError):
        compare(plan(), fleet, fail, pause=0)

    assert len(fleet.workers) == 2 and all(worker.is_closed for worker in fleet.workers)


def test_outputs_are_compared_with_those_of_ours() -> None:
    other = Engine("peer int8", "peer", "int8", OURS.name)

    comparison = run_comparison(plan(OURS, PEER, other, concurrencies=(2,)), Fleet())

    # Two rounds of two batches of two: few at once are asked for again.
    assert comparison.agreements == (
        Agreement(PEER.name, OURS.name, 2, True, 8, 8),
        Agreement(other.name, OURS.name, 2, False, 0, 8),
    )


def test_only_engines_that_must_agree_are_reported_as_disagreeing() -> None:
    must, may = Agreement("a", "ours", 8, True, 30, 40), Agreement("b", "ours", 8, False, 0, 40)

    assert disagreements([must, may]) == ("a at concurrency 8: 30 of 40 outputs are those of ours",)
    assert disagreements([replace(must, equal=40)]) == ()


def test_ratios_are_those_of_each_round() -> None:
    def run(engine: str, number: int, seconds: float) -> Run:
        return Run(engine, 1, number, {}, seconds, seconds / 2, 0.0)

    times = {OURS.name: (2.0, 4.0, 2.0), PEER.name: (4.0, 6.0, 8.0)}
    runs = tuple(run(name, n, t) for name, of in times.items() for n, t in enumerate(of))

    ours, peer = summarize(plan().work, Comparison(runs, (), {}, {}))

    assert ours.ratio is None
    assert (peer.ratio, peer.least_ratio, peer.largest_ratio) == (2.0, 1.5, 4.0)
    assert peer.tokens_per_second == 3 / 6
    assert peer.decode_tokens_per_second == 2 / 3


def results_of(comparison: Comparison) -> Results:
    return Results(
        work=plan().work,
        command="python -m loadtest.lab.peers",
        commit="c0ffee",
        started_at="now",
        machine="a machine",
        num_threads=2,
        lines=summarize(plan().work, comparison),
        disagreements=("peer fp32 at concurrency 1: 0 of 2",),
        comparison=comparison,
    )


def test_the_table_names_every_engine_ratio_version_and_disagreement() -> None:
    text = to_markdown(results_of(run_comparison(plan(), Fleet())))

    assert "| 2 | peer fp32 | 0.7 |" in text
    assert "| tokenweir fp32 | 1.50 (1.50 - 1.50) |" in text
    assert "- DISAGREES: peer fp32 at concurrency 1: 0 of 2" in text
    assert "versions: peer 1.0, tokenweir 1.0" in text


def test_everything_measured_is_kept_in_the_file(tmp_path: Path) -> None:
    comparison = run_comparison(plan(), Fleet())

    json_file, markdown = write(results_of(comparison), tmp_path / "results")

    kept = json.loads(json_file.read_text())
    assert len(kept["comparison"]["runs"]) == len(comparison.runs) == 8
    assert markdown.name == "tiny.md"


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    write_png(results_of(run_comparison(plan(), Fleet())), tmp_path / "tiny.png")

    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", WORKS)
def test_every_peer_is_compared_with_an_engine_of_the_same_work(name: str) -> None:
    engines = {engine.name: engine for engine in WORKS[name].engines}

    for engine in engines.values():
        assert engine.against is None or engines[engine.against].against is None


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., WorkerProcess]]:
    """Start a worker process with the adapter of fake_peer.py."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    started: list[WorkerProcess] = []

    def make(**options: Any) -> WorkerProcess:
        log = tmp_path / "workers.log"
        started.append(WorkerProcess("tests.lab.fake_peer", replace(OPTIONS, **options), log))
        return started[-1]

    yield make
    for worker in started:
        worker.close()


def test_a_worker_answers_from_its_own_process(start: Callable[..., WorkerProcess]) -> None:
    worker = start()

    sample = worker.generate([[1, 2], [5, 6]], 3)

    assert sample.tokens == ((3, 4, 5), (7, 8, 9))
    assert sample.seconds > 0
    assert worker.versions == {"counting": "1.0"}


def test_a_failure_of_an_engine_says_what_failed(start: Callable[..., WorkerProcess]) -> None:
    worker = start()

    with pytest.raises(WorkerError, match="ValueError: no token is negative"):
        worker.generate([[-1]], 3)


def test_an_engine_that_does_not_load_says_why(start: Callable[..., WorkerProcess]) -> None:
    with pytest.raises(WorkerError, match="FileNotFoundError: no such weights"):
        start(weights="lost")


def test_too_few_tokens_are_an_error(start: Callable[..., WorkerProcess]) -> None:
    worker = start(setting={"short": 1})

    with pytest.raises(WorkerError, match=r"asked for 1 times 3 tokens, got 1 times \[2\]"):
        worker.generate([[1]], 3)
