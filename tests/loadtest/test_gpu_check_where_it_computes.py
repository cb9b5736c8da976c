"""The check of a GPU on a device that computes: what is right passes, what is wrong does not.

On the emulated device everything fails that can, for nothing is computed there.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.cache_memory import DeviceCacheMemory
from engine.cuda.sampling_calls import SamplingCalls
from engine.package.graph_io import SAMPLING_GRAPHS
from engine.package.manifest import Precision
from engine.sampling.plain import SamplingInputs
from engine.session import NOT_CAPTURED
from engine.slots.calls.graph_call import GraphCall
from loadtest.gpu_check import draws, pieces, probes
from loadtest.gpu_check.device_decoder import DeviceDecoder, Floats
from loadtest.gpu_check.part import Outcome, Settings
from tests import fake_gpu

CHUNK = 3  # tokens: short prompts come in several


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    fake_gpu.put_in(monkeypatch)
    monkeypatch.setattr(probes, "_CHUNK", CHUNK)
    monkeypatch.setattr(probes, "elsewhere", lambda run, given, **kw: probes.digest(given, **kw))
    return Settings("cuda", quick=True, work=tmp_path)


def rows(settings: Settings, model: str, precision: Precision) -> Outcome:
    return probes.probe(settings, model, precision, judged="yes")


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("llama", "fp16"),
        pytest.param("llama", "fp32", marks=pytest.mark.long),
        pytest.param("gpt2", "fp16", marks=pytest.mark.long),
        pytest.param("gpt2", "fp32", marks=pytest.mark.long),
    ],
)
def test_rows_pass_and_rows_that_depend_on_others_fail(
    model: str, precision: Precision, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = rows(settings, model, precision)

    assert right.passed, right.summary
    against = right.found["against_cpu"]
    assert against["tokens_equal"] == against["tokens"] > 0

    decode = DeviceDecoder.decode

    def depending(
        self: DeviceDecoder, tokens: Any, bucket: int, graph_id: int = NOT_CAPTURED
    ) -> Floats:
        found = decode(self, tokens, bucket, graph_id)
        return found + np.float32(1e-6 * (len(tokens) - 1))

    monkeypatch.setattr(DeviceDecoder, "decode", depending)

    wrong = rows(settings, model, precision)

    assert not wrong.passed and "NOT equal among others" in wrong.summary


@pytest.mark.parametrize(("elsewhere", "is_right"), [("one", True), ("another", False)])
def test_rows_are_those_that_another_process_finds(
    elsewhere: str, is_right: bool, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {
        "_graphs": Path("graphs"),
        "_load": None,
        "_against_cpu": {"max_diff": 0.0, "logit_std": 1.0, "tokens_equal": 1, "tokens": 1},
        "_invariance": {
            "computes": True,
            "same_again": True,
            "same_among_others": True,
            "digest": "one",
            "max_diff_by_bucket": {"8": 0.0},
        },
        "_times": [],
    }
    for name, found in measured.items():
        monkeypatch.setattr(probes, name, lambda *given, found=found: found)
    monkeypatch.setattr(
        probes, "elsewhere", lambda *given, **kw: Outcome("", {"digest": elsewhere})
    )

    outcome = rows(settings, "llama", "fp16")

    assert outcome.passed == is_right
    assert ("NOT equal in another process" in outcome.summary) != is_right


@pytest.mark.parametrize(
    "wrong",
    [
        {"computes": False},
        {"same_again": False},
        {"same_among_others": False},
        {"digest_again": "another"},
        {"against_cpu": {"max_diff": 0.1, "logit_std": 2.0}},
        {"against_cpu": {"max_diff": math.inf, "logit_std": 2.0}},
    ],
    ids=str,
)
def test_rows_are_right_only_where_nothing_is_wrong(wrong: dict[str, Any]) -> None:
    right = {
        "computes": True,
        "same_again": True,
        "same_among_others": True,
        "digest": "one",
        "digest_again": "one",
        "against_cpu": {"max_diff": 0.07, "logit_std": 2.0},
    }

    assert probes._is_right(right, "fp16")
    assert not probes._is_right(right | wrong, "fp16")


def test_rows_that_do_not_arrive_as_they_were_fail(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pieces.copy_rows(settings).passed

    monkeypatch.setattr(DeviceCacheMemory, "swap", lambda *_: None)

    wrong = pieces.copy_rows(settings)
    assert not wrong.passed and wrong.summary == "rows did not arrive as they were"


def test_draws_are_timed_and_those_of_other_numbers_fail(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = draws.time_draws(settings)

    assert right.passed, right.summary
    (rows,) = right.found["tables"].values()
    assert [(row["rows"], row["graph"]) for row in rows] == list(product((2, 4), SAMPLING_GRAPHS))
    assert all(row["eager"] > 0 and row["captured"] > 0 for row in rows)

    plan = SamplingCalls.plan

    def turned(calls: SamplingCalls, asked: SamplingInputs, *size: int) -> GraphCall:
        is_turned = calls._graph_ids is not None
        return plan(calls, asked._replace(uniform=1 - asked.uniform) if is_turned else asked, *size)

    monkeypatch.setattr(SamplingCalls, "plan", turned)

    wrong = draws.time_draws(settings)
    assert not wrong.passed
    assert "; captured: " in wrong.summary and "the sampler" in wrong.summary
    assert not any(one.startswith("eager") for one in wrong.found["wrong"])
