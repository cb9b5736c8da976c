"""All that a load test has measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from loadtest.answers import Checks
from loadtest.config import LoadConfig
from loadtest.goals import GoalOutcome, Goodput
from loadtest.metrics import LoadSummary, OwnLoad, RequestRecord, Window
from loadtest.target.target import ServerSample


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of the figures of a load test, or of several that differ in their rate."""

    config: LoadConfig
    work: str  # the requests, in words
    started_at: datetime
    versions: Mapping[str, str]
    command: str = ""
    commit: str = ""  # the load test's code
    machine: str = ""  # machine of the load test


@dataclass(frozen=True, kw_only=True)
class LoadReport(Origin):
    """A load test with its settings, its figures and every request."""

    num_different: int | None  # requests until they repeated; None: they never did
    method: str  # for requests that name none: "generate", streamed, or "classify", ...
    window: Window  # in which the figures were measured
    summary: LoadSummary
    records: tuple[RequestRecord, ...]  # by index, then turn
    kinds: Mapping[str, LoadSummary] = field(default_factory=dict)  # parts of a mix
    goodput: Goodput | None = None  # only with bounds
    goals: tuple[GoalOutcome, ...] = ()
    checks: Checks = Checks()
    server: tuple[ServerSample, ...] = ()  # the server's own figures meanwhile
    own: OwnLoad | None = None
    interrupted: bool = False  # requests under way then are in no record
    invalid: tuple[str, ...] = ()  # why the figures may not be those of the server

    @property
    def num_failed(self) -> int:
        """Requests of the whole test, warm-up included, that were answered with an error."""
        return sum(not record.ok for record in self.records)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why not all is well, a line each."""
        return (*self.faults, *self.invalid)

    @property
    def faults(self) -> tuple[str, ...]:
        """Failures, wrong answers and missed bounds; a late client is no fault."""
        found = []
        if self.num_failed:
            found.append(f"{self.num_failed} of {len(self.records)} requests failed")
        if not (self.summary.num_due or self.interrupted):
            found.append(
                "nothing was measured: no request was due behind the warm-up; give more requests "
                "or a shorter warm-up"
            )
        found += [f"threshold missed: {goal}" for goal in self.goals if not goal.is_kept]
        found += self.wrong_answers
        if self.checks.num_unverified and not self.interrupted:
            found.append(f"{self.checks.num_unverified} answers could not be verified")
        return tuple(found)

    @property
    def wrong_answers(self) -> tuple[str, ...]:
        """How many answers were wrong, a line for each way to compare them."""
        checks = self.checks
        found: list[str] = []
        if checks.num_wrong_expected:
            found.append(
                f"{checks.num_wrong_expected} of {checks.num_expected} answers are not those "
                "expected"
            )
        if checks.num_wrong_verified:
            found.append(
                f"{checks.num_wrong_verified} of {checks.num_verified} answers are others than to "
                "the same requests alone"
            )
        return tuple(found)


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
