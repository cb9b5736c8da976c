"""A load test as the command line asks for it: run, shown, printed, its files written."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from engine.machine import machine_name
from loadtest.arrival.arrival import Arrival, ClosedLoop, OpenLoop, Replay
from loadtest.arrival.rates import Rates
from loadtest.cli.default_prompts import default_prompts
from loadtest.cli.files import ReportFiles
from loadtest.cli.options import REQUEST_OPTIONS
from loadtest.config import LoadConfig
from loadtest.goals import parse_slo
from loadtest.interruption import signals_held
from loadtest.load_report import LoadReport
from loadtest.origin import code_commit, typed_command
from loadtest.reports.live import shown
from loadtest.reports.report import print_series, print_table, trial_line
from loadtest.runner import LoadTest
from loadtest.search import SearchRule
from loadtest.series import Series, SeriesReport
from loadtest.work.ask import Work, texts
from loadtest.work.common import Common
from loadtest.work.expecting import expecting
from loadtest.work.mix import Mix
from loadtest.work.requests_file import read_lines, read_requests
from loadtest.work.synthetic import Synthetic
from server.cli.calls.generation_options import client_options

_DEFAULT_REQUESTS, _DEFAULT_CONCURRENCY, _DEFAULT_TRIAL = 200, 8, 10.0


class Measurement:
    """A load test, or a series of them, of options that were typed."""

    def __init__(
        self, typed: dict[str, Any], stack: ExitStack, early: Sequence[int], *, is_series: bool
    ) -> None:
        """Its prompts are there until the stack ends; a signal in `early` has ended it.

        Raises UsageError or LoadTestError for what does not fit together, or cannot be used.
        """
        self._typed, self._early = typed, early
        paths = {name: typed[f"{name}_file"] for name in ("json", "csv", "html", "png")}
        self._files = ReportFiles(**paths, answers=typed["answers"])
        self._config = _config_of(typed, is_series=is_series)
        self._files.check()
        self._work = _work_of(typed, stack)

    def report(self) -> LoadReport:
        """Run a load test, write its files, print its table."""
        with ExitStack() as stack:
            with shown(self._config) as watch:
                test = LoadTest(self._config, self._work, watch, self._client_arguments)
                report = test.run(early=self._early)
                stack.enter_context(signals_held())
            report = replace(report, **_made_here())
            self._files.write(report, test.kept)
        print_table(report)
        return report

    def report_series(
        self, rounds: int, tolerance: float, sweep: tuple[float, ...]
    ) -> SeriesReport:
        """Run several load tests, write their files, print their table."""
        with asyncio.Runner() as runner:

            def run_shown(one: LoadConfig) -> LoadReport:
                with shown(one) as watch:
                    test = LoadTest(one, self._work, watch, self._client_arguments)
                    return test.run(runner.run, self._early)

            def tell(trial: Any) -> None:
                click.echo(trial_line(trial), err=True)

            series = Series(self._config, run_shown, tell)
            rule = SearchRule(series.first_rate, tolerance, rounds)
            report = series.sweep(sweep) if sweep else series.search(rule)
            with signals_held():
                report = replace(report, origin=replace(report.origin, **_made_here()))
                self._files.write_series(report)
        print_series(report)
        return report

    def _client_arguments(self) -> Mapping[str, Any]:
        token = self._typed["admin_token"]
        return {**self._typed["server"].client_arguments, "admin_token": token}


def _made_here() -> dict[str, Any]:
    """Return the command of this process, the code and the machine."""
    return {"command": typed_command(), "commit": code_commit(), "machine": machine_name()}


def _work_of(typed: dict[str, Any], stack: ExitStack) -> Work:
    """Return what is asked, until the stack ends; LoadTestError for files that cannot be used."""

    named = client_options({str(one.name): typed[str(one.name)] for one in REQUEST_OPTIONS})
    options = {**named, **dict(typed["options"])}
    lengths, seed = typed["output_tokens"], typed["seed"]
    prompts, method = _prompts(typed, stack), typed["method"]
    work: Work = Common(prompts, options, method, typed["turns"], lengths, seed)
    if typed["mix"]:
        names = [kind.name for kind in typed["mix"]]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise click.UsageError(f"two kinds of --mix are called {twice[0]!r}; rename one")
        work = Mix(work, typed["mix"], seed)
    if (path := typed["expect"]) is not None:
        work = expecting(work, read_requests(path, typed["token_ids"]).asks, path.name)
    return work


def _prompts(typed: dict[str, Any], stack: ExitStack) -> Work:

    path: Path | None = typed["prompts"]
    if typed["input_tokens"] is not None:
        if path is not None:
            raise click.UsageError("--prompts and --input-tokens both say what is asked; give one")
        return Synthetic(typed["input_tokens"], typed["token_ids"], typed["seed"])
    if path is None:
        return stack.enter_context(default_prompts(typed["server"], typed["model"]))
    if path.suffix == ".jsonl":
        return read_requests(path, typed["token_ids"])
    return texts(read_lines(path))


def _config_of(typed: dict[str, Any], *, is_series: bool) -> LoadConfig:
    """Return the settings; UsageError or LoadTestError for what does not fit together."""

    arrival = _arrival(typed, is_series)
    requests, duration = typed["requests"], typed["duration"]
    slo = None if typed["slo"] is None else parse_slo(typed["slo"], typed["percentile"])
    if requests is None and duration is None and arrival.name != "trace":
        trial = max(_DEFAULT_TRIAL, slo.seconds_to_see if slo else 0.0)
        requests, duration = (None, trial) if is_series else (_DEFAULT_REQUESTS, None)
    return LoadConfig(
        address=typed["server"].address,
        model=typed["model"],
        arrival=arrival,
        num_requests=requests,
        duration=duration,
        warmup=typed["warmup"],
        cooldown=typed["cooldown"],
        seed=typed["seed"],
        timeout=typed["timeout"],
        slo=slo,
        verify=typed["verify"],
        keep_answers=typed["answers"] is not None,
        num_processes=typed["processes"],
        admin_address=typed["admin"],
    )


def _arrival(typed: dict[str, Any], is_series: bool) -> Arrival:

    rates, concurrency = typed["rate"], typed["concurrency"]
    if concurrency is not None and (rates is not None or is_series):
        raise click.UsageError("give --rate for an open loop, or --concurrency for a closed one")
    if typed["arrival"] == "trace":
        if rates is not None or concurrency is not None or is_series:
            raise click.UsageError("a trace has its own times; leave out --rate and --concurrency")
        return Replay(typed["trace_speed"])
    if is_series and rates is not None and not rates.is_constant:
        raise click.UsageError(f"--rate {rates} is not one rate; give where a search begins")
    if rates is None and not is_series:
        return ClosedLoop(concurrency or _DEFAULT_CONCURRENCY)
    return OpenLoop(rates or Rates((1.0,)), typed["arrival"], typed["burstiness"])
