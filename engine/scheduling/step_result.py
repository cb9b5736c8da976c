"""The result of a step."""

from __future__ import annotations

from typing import NamedTuple

from engine.requests.events import PositionLogprobs
from engine.sampling.draws import Choice
from engine.sampling.logits import Floats
from engine.sampling.plain import PlainChoices


class StepResult(NamedTuple):
    """The choices and scores of a step, in memory of its own that the next step leaves alone.

    A choice or score of None: there is none, and its request fails.
    """

    plain: PlainChoices = PlainChoices()  # those of Step.sampling_batch
    choices: tuple[Choice, ...] = ()  # one for each of Step.draws
    scores: tuple[tuple[PositionLogprobs, ...] | None, ...] = ()  # one for each of Step.scores
    alignment: Floats | None = None  # [Parts.aligned, longest source], if any
    num_padding: int = 0  # tokens computed for nobody
    model_seconds: float = 0.0
    sampling_seconds: float = 0.0
