"""The check of a GPU: a figure of its tables is the one that was measured, under its own name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.package.manifest import DeviceCertificate, PackageFormat, Precision, Weights
from engine.session import NOT_CAPTURED
from loadtest.gpu_check import certificates, speed, steps, watch
from loadtest.gpu_check.part import Settings
from loadtest.gpu_check.timing import Timed
from loadtest.lab.peers.comparison import Answered, Comparison, Loop, Plan
from loadtest.lab.peers.results import Line
from loadtest.lab.peers.worker import LoadOptions
from loadtest.lab.peers.works import Engine
from loadtest.lab.turns import Ratio

TIMES = {
    "eager": Timed(total=400.0, host=40.0, busy=0.4),
    "captured": Timed(total=100.0, host=10.0, busy=0.9),
    "eager, ids read": Timed(total=500.0, host=50.0, busy=0.5),
    "captured, ids read": Timed(total=200.0, host=20.0, busy=0.8),
}


@pytest.fixture
def graph_ids(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The id that each work has run with; works take the times above."""
    ran: list[int] = []
    found: dict[str, int] = {}

    def time(
        works: Mapping[str, Callable[[], object]], wait: object, seconds: float
    ) -> dict[str, Timed]:
        for name, work in works.items():
            work()
            found[name] = ran[-1]
        return {name: TIMES[name] for name in works}

    monkeypatch.setattr(steps, "time_in_turns", time)
    monkeypatch.setattr(DECODER, "run", lambda *given, graph_id: ran.append(graph_id))
    return found


DECODER = SimpleNamespace(
    capacity=64, contract=SimpleNamespace(vocab_size=50), read_ids=lambda num_rows: None, run=None
)


def measure() -> steps._Measure:
    device: Any = SimpleNamespace(runtime=SimpleNamespace(synchronize=lambda: None))
    return steps._Measure(DECODER, device, quick=True)  # type: ignore[arg-type]


def test_a_decode_step_is_that_of_all_its_rows_captured_and_read(graph_ids: dict[str, int]) -> None:
    row = measure().decode(32, 1)

    assert (row["rows"], row["tokens/s"]) == (32, 32 * 1e6 / 200)
    assert [row[name] for name in TIMES] == [400, 100, 500, 200]
    assert (row["eager, host"], row["captured, host"]) == (40, 10)
    assert (row["busy"], row["busy, queued"], row["busy, eager"]) == (0.8, 0.9, 0.5)
    eager = {name: NOT_CAPTURED for name in ("eager", "eager, ids read")}
    assert graph_ids == {**eager, "captured": 1, "captured, ids read": 1}


def test_a_chunk_of_a_prompt_is_that_of_all_its_tokens(graph_ids: dict[str, int]) -> None:
    row = measure().chunk(8, 1)

    assert (row["tokens"], row["tokens/s"], row["tokens/s captured"]) == (8, 2e4, 8e4)
    assert graph_ids == {"eager": NOT_CAPTURED, "captured": len(steps._QUICK_ROWS) + 1}


def test_memory_of_weights_and_of_rows_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [10]  # by others
    device: Any = SimpleNamespace(
        runtime=SimpleNamespace(free_memory=lambda: (1000 - sum(taken), 1000)),
        create_session=lambda path: taken.append(300),
    )
    monkeypatch.setattr(steps, "read_contract", lambda path: None)
    decoder = SimpleNamespace(fill=lambda rng: None)
    monkeypatch.setattr(steps, "DeviceDecoder", lambda *given: taken.append(70) or decoder)
    (tmp_path / "decoder.onnx.data").write_bytes(bytes(5))

    found, _ = steps._load(tmp_path, device, 3)

    assert (found["bytes_of_session"], found["bytes_of_rows"]) == (300, 70)
    assert (found["weight_file_bytes"], found["num_rows"]) == (5, 3)


LINE = Line("one", None, 32, 11.0, 0.02, None, 0.003, Ratio(1.5, 1.4, 1.6), None, None, 3, 0)


def test_whole_requests_first_tokens_and_those_behind_have_a_column_each() -> None:
    seen: Any = SimpleNamespace(busy=lambda engine, streams: 0.7 if streams == 32 else None)

    (row,) = speed._found("gpt2-124m", (LINE,), Comparison((), (), {}, {}), seen)["tables"][
        "whole requests in fp16"
    ]

    assert row == {
        "streams": 32,
        "engine": "one",
        "tokens/s": 11,
        "first token ms": 20,
        "ms a token behind it": 3,
        "their time / ours": 1.5,
        "least": 1.4,
        "largest": 1.6,
        "of a token": None,
        "GPU busy": 0.7,
    }


@pytest.mark.parametrize(("quick", "streams"), [(False, (1, 32, 256)), (True, (1, 3))])
def test_whole_requests_are_compared_at_one_and_at_many_streams(
    quick: bool, streams: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr(speed, "build", lambda *given, quick: tmp_path / "graphs")
    monkeypatch.setattr(
        speed, "compare", lambda plan, *given: plans.append(plan) or Comparison((), (), {}, {})
    )

    speed.compare_shape(Settings("cuda", quick, tmp_path), "llama-1b")

    assert [plan.concurrencies for plan in plans] == [streams]


def test_a_gpu_is_as_busy_as_in_the_middle_one_of_the_runs_that_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = iter([0.2, 0.9, 0.4, 1.0])

    class Use:
        def __enter__(self) -> Use:
            self.busy = next(shares)
            return self

        def __exit__(self, *given: object) -> None: ...

    monkeypatch.setattr(watch, "GpuUse", Use)
    answered = Answered(1.0, 0.1, 0.1, ())
    peer: Any = SimpleNamespace(versions={}, ask=lambda loop: answered)
    seen = watch.Watch(lambda engine, options: peer)
    one = seen.start(Engine("one", "it", "it", None), LoadOptions("it", "it", 1, 3, 18, 1, {}))

    for _ in range(3):
        one.ask(Loop(2, 4, 1, 6, 11, seed=0))

    assert seen.busy("one", 2) == 0.4
    assert seen.busy("one", 1) is None


@pytest.mark.parametrize(
    ("is_equal", "buckets", "precision", "weights", "is_right"),
    [
        (True, (8,), "fp16", None, True),
        (False, (8,), "fp16", None, False),
        (False, (8,), "fp32", None, False),
        (False, (8,), "fp16", "int4", True),  # rounded weights are not promised to be
        (False, (1, 8), "fp16", None, True),  # nor calls of several shapes
        (False, (), "fp16", None, True),  # nor answers in one pass
    ],
)
def test_rows_that_differ_by_batch_fail_where_they_are_made_to_be_equal(
    is_equal: bool,
    buckets: tuple[int, ...],
    precision: Precision,
    weights: Weights | None,
    is_right: bool,
) -> None:
    shown = DeviceCertificate.model_construct(batch_invariant=is_equal, buckets=buckets)

    found = certificates._is_right(shown, PackageFormat.of("cuda", precision, weights))

    assert found == is_right
