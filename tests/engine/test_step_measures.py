"""Counts and times of an engine's steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.generation.core import EngineCore
from engine.histogram import Histogram
from engine.requests.request import SamplingParams
from engine.scheduling.sequence import TokenRequest
from engine.step_measures import StepMeasures
from tests.conftest import Script, ScriptedRunner


def test_a_value_belongs_to_the_first_bound_that_is_not_below_it() -> None:
    histogram = Histogram((1.0, 2.0))

    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.add(value)
    histogram.add(2.0, count=3)

    assert histogram.counts() == [2, 4, 1, 11.5]


def test_time_between_tokens_is_that_between_the_ends_of_steps() -> None:
    measures = StepMeasures()

    measures.took_step(0.0, 1.0, batch_size=1)  # a prompt: its first token comes at the end
    measures.took_step(1.5, 2.5, batch_size=3, num_continued=2)

    assert measures.seconds.counts()[-1] == 2.0
    assert measures.inter_token.counts()[-1] == 2 * 1.5
    assert sum(measures.batch_size.counts()[:-1]) == 2


@pytest.mark.parametrize("max_source_len", [None, 16])
def test_every_token_but_the_first_of_a_sequence_has_a_time_before_it(
    max_source_len: int | None,
    make_core: Callable[..., tuple[EngineCore, ScriptedRunner]],
    spell: Callable[[str], Script],
) -> None:
    shape = {"max_source_len": max_source_len} if max_source_len else {}
    core, _ = make_core(spell("abcdef"), **shape)
    for key in range(3):
        params = SamplingParams(max_new_tokens=20)
        core.scheduler.add(TokenRequest(key, f"r{key}", (*b"ask>",), params, 0, 0.0))

    while core.scheduler.has_work:
        core.step()

    *counts, _ = core.measures.inter_token.counts()
    assert sum(counts) == 3 * len("abcdef")  # and the end of each
    assert sum(core.measures.seconds.counts()[:-1]) == core.times.steps
