"""A load test at one of several rates, of which the figures are kept and not every request."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.goals import GoalOutcome, Goodput
from loadtest.load_report import LoadReport
from loadtest.metrics import LoadSummary


@dataclass(frozen=True)
class Trial:
    """One load test."""

    rate: float  # requests a second that were sent
    seed: int
    summary: LoadSummary
    num_failed: int
    is_kept: bool  # every bound was; without bounds: no request failed
    goodput: Goodput | None = None
    goals: tuple[GoalOutcome, ...] = ()
    invalid: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()  # all that was not well beside that
    wrong_answers: tuple[str, ...] = ()  # those of the faults that no rate excuses


def trial_of(report: LoadReport, rate: float) -> Trial:
    """Return the figures of a report."""
    bounds_kept = all(goal.is_kept for goal in report.goals)
    return Trial(
        rate=rate,
        seed=report.config.seed,
        summary=report.summary,
        num_failed=report.num_failed,
        is_kept=bounds_kept and (bool(report.goals) or not report.num_failed),
        goodput=report.goodput,
        goals=report.goals,
        invalid=report.invalid,
        faults=report.faults,
        wrong_answers=report.wrong_answers,
    )
