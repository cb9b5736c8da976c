"""Several load tests of one server at several rates: a sweep, or the search for the highest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from loadtest.arrival.arrival import OpenLoop
from loadtest.arrival.rates import Rates
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.load_report import LoadReport, Origin, Trial, trial_of
from loadtest.search import RateSearch, Search, SearchRule

Run = Callable[[LoadConfig], LoadReport]


@dataclass(frozen=True)
class SeriesReport:
    """All that several load tests have found."""

    origin: Origin
    trials: tuple[Trial, ...]  # in the order in which they were made
    search: Search | None = None
    interrupted: bool = False

    @property
    def problems(self) -> tuple[str, ...]:
        """Why not all is well, a line each."""
        return (*self.faults, *self.invalid)

    @property
    def invalid(self) -> tuple[str, ...]:
        """Why figures may not be those of the server; a search measures such rates again."""
        is_sweep = self.search is None
        return tuple(_at_rates(self.trials, lambda trial: trial.invalid)) if is_sweep else ()

    @property
    def faults(self) -> tuple[str, ...]:
        """Further faults. A search looks for rates that miss the bounds."""
        if self.search is None:
            return tuple(_at_rates(self.trials, lambda trial: trial.faults))
        nothing = "" if self.search.rate else "no rate was found that keeps the bounds"
        wrong = _at_rates(self.trials, lambda trial: trial.wrong_answers)
        return tuple(filter(None, (nothing, self.search.stopped, *wrong)))


def _at_rates(trials: Iterable[Trial], lines: Callable[[Trial], tuple[str, ...]]) -> Iterator[str]:
    for trial in trials:
        for line in lines(trial):
            yield f"at {trial.rate:g} requests/s {line}"


class Series:
    """Runs load tests that differ in their rate only."""

    def __init__(
        self, config: LoadConfig, run: Run, tell: Callable[[Trial], None] = lambda trial: None
    ) -> None:
        """`tell` is given every load test as soon as it has ended."""
        if not isinstance(config.arrival, OpenLoop):
            raise LoadTestError("rates are those of an open loop; leave out the concurrency")
        self._config = config
        self._arrival = config.arrival
        self._run = run
        self._tell = tell
        self._last: LoadReport | None = None
        self._started_at = datetime.now(UTC)

    @property
    def first_rate(self) -> float:
        """The rate of the settings, in requests a second."""
        return self._arrival.rates.mean

    def sweep(self, rates: tuple[float, ...]) -> SeriesReport:
        """Run at each of the rates."""
        trials: list[Trial] = []
        with suppress(KeyboardInterrupt):  # between two tests; one under way ends by itself
            for rate in rates:
                trial = self._measure(rate, self._config.seed)
                if trial is None:
                    break
                trials.append(trial)
        return SeriesReport(self._origin(), tuple(trials), interrupted=len(trials) < len(rates))

    def search(self, rule: SearchRule) -> SeriesReport:
        """Find the highest rate that keeps the bounds; LoadTestError if there are none."""
        if self._config.slo is None:
            raise LoadTestError("a search needs bounds to keep; give them, as ttft=200ms,e2e=2s")
        search = RateSearch(partial(self._measure, is_search=True), rule)
        found = search.find()
        interrupted = found.stopped == "interrupted"
        return SeriesReport(self._origin(), tuple(search.trials), found, interrupted)

    def _measure(self, rate: float, seed: int, is_search: bool = False) -> Trial | None:
        """Run once; None if it was interrupted."""
        arrival = replace(self._arrival, rates=Rates((rate,)))
        config = replace(self._config, arrival=arrival, seed=seed, stop_when_missed=is_search)
        self._last = self._run(config)
        if self._last.interrupted:
            return None
        trial = trial_of(self._last, rate)
        self._tell(trial)
        return trial

    def _origin(self) -> Origin:
        last = self._last
        return Origin(
            config=self._config,
            work=last.work if last else "",
            started_at=self._started_at,
            versions=last.versions if last else {},
        )
