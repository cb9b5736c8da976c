"""The chart of a comparison: speeds relative to the fastest other engine with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.lab.peers.chart import Document, Speed, relative_speeds

GPT2 = Path(__file__).parents[2] / "loadtest" / "results" / "gpt2.json"
OURS, QUICK, SLOW = "tokenweir fp32", "quick f32", "slow f32"


def document(*lines: tuple[str, str | None, int, float | dict[str, float] | None]) -> Document:
    names = ("engine", "against", "concurrency", "ratio")
    work = {"name": "tiny", "model": "gpt2", "num_prompt_tokens": 2, "num_new_tokens": 2}
    return Document.model_validate(
        {
            "work": work,
            "machine": "a processor, 2 cores",
            "num_threads": 2,
            "lines": [dict(zip(names, line, strict=True)) for line in lines],
        }
    )


def test_the_fastest_other_engine_has_one_and_engines_are_sorted() -> None:
    found = document(
        (OURS, None, 1, None),
        (SLOW, OURS, 1, 3.0),
        (QUICK, OURS, 1, {"median": 1.5, "least": 1.0, "largest": 2.0}),
    )

    (group,) = relative_speeds(found.lines)

    assert group == [Speed(OURS, 1, 1.5), Speed(QUICK, 1, 1.0), Speed(SLOW, 1, 0.5)]


def test_a_comparison_that_is_lost_is_below_one() -> None:
    (group,) = relative_speeds(document((OURS, None, 1, None), (QUICK, OURS, 1, 0.8)).lines)

    assert group == [Speed(QUICK, 1, 1.0), Speed(OURS, 1, 0.8)]


def test_engines_are_compared_with_those_of_the_same_weights() -> None:
    document = Document.model_validate_json(GPT2.read_text())

    groups = relative_speeds(document.lines)

    assert [group[0].engine for group in groups] == ["tokenweir fp32", "tokenweir int8"]
    for group in groups:
        fastest = [one.value for one in group if not one.engine.startswith("tokenweir")]
        assert max(fastest) == pytest.approx(1)
