"""Compares the attention to the source that a package gives with the eager model's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.sampling.logits import StepLogits
from exporter.certificate.eager import eager_alignment
from exporter.certificate.generation_cases import Case
from exporter.certificate.sides import Sides, step_of
from exporter.samples import Tokens

NUM_CASES = 8  # at most


def choose_cases(cases: Sequence[Case], count: int = NUM_CASES) -> list[Case]:
    """Return `count` cases with sources of all lengths, some of them with a given prefix."""
    ordered = sorted(cases, key=lambda case: (len(case.prompt) > 1, len(case.source)))
    places = np.linspace(0, len(ordered) - 1, min(count, len(ordered))).astype(int)
    return [ordered[place] for place in places]


def check_alignment(sides: Sides, case: Case, tokens: Tokens, seen: StepLogits, how: str) -> None:
    """Compare the attention behind every position of a case.

    Raises CertificateError at the first difference that the comparison refuses.
    """
    assert seen.alignment is not None, "it was asked for"
    eager = eager_alignment(sides.model, case, tokens)
    padding = seen.alignment.shape[1] - eager.shape[1]  # nothing is seen there
    eager = np.pad(eager, ((0, 0), (0, padding)))  # [num_logits, longest source]
    sides.comparison.alignment(seen.alignment, eager, step_of(case, how))
