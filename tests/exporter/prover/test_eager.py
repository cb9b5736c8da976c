"""What the eager model computes of the cases that a certificate compares."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from exporter.certificate.eager import MAX_PADDING, alike
from exporter.certificate.generation_cases import Case


@pytest.mark.parametrize("source_lengths", [[0], [1, 9, 30, 60]])
def test_cases_run_beside_those_of_like_length(source_lengths: list[int]) -> None:
    cases = [
        Case((5,) * source, (5,) * prompt, num_tokens=4)
        for source in source_lengths
        for prompt in (1, 2, 3, 8, 40)
        for _ in range(8)
    ]
    np.random.default_rng(0).shuffle(cases)  # type: ignore[arg-type]

    batches = list(alike(cases))

    assert sorted(chain(*batches)) == list(range(len(cases)))
    assert len(batches) < len(cases) / 3
    for batch in batches:
        members = [cases[i] for i in batch]
        for sizes in (
            [len(case.source) for case in members],
            [len(case.prompt) for case in members],
        ):
            assert len(sizes) * max(sizes) - sum(sizes) <= MAX_PADDING


def test_a_case_that_is_longer_than_any_batch_runs_alone() -> None:
    cases = [Case((), (5,) * 4000, 4), Case((), (5,), 4), Case((), (5,) * 4000, 4)]

    assert list(alike(cases)) == [[1], [0], [2]]
