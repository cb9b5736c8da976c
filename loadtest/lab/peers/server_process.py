"""A server in a process of its own: started, asked by the load test, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from loadtest.answers import KeptAnswer
from loadtest.arrival.arrival import ClosedLoop
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.lab.peers.comparison import Answered, Loop
from loadtest.lab.peers.servers.launch import MODEL, launch
from loadtest.lab.peers.worker import LoadOptions
from loadtest.lab.serve import free_port
from loadtest.load_report import LoadReport
from loadtest.runner import LoadTest
from loadtest.target.open_target import open_target
from loadtest.target.target import CallFailed
from loadtest.work.common import Common
from loadtest.work.lengths import parse_lengths
from loadtest.work.synthetic import Synthetic

_START_TIMEOUT = 120.0  # seconds until the first answer
_LOOK_PERIOD = 0.1  # seconds
_END_TIMEOUT = 60.0  # seconds for a server to end when it is told to
_REQUEST_TIMEOUT = 300.0  # seconds


class ServerProcess:
    """A server and all below it; LoadTestError says that it does not answer."""

    def __init__(self, name: str, options: LoadOptions, log: Path) -> None:
        try:
            self._launch = launch(name, options, free_port())
        except (ImportError, OSError, subprocess.CalledProcessError) as error:
            raise LoadTestError(f"{type(error).__name__}: {error}") from error
        self.versions: Mapping[str, str] = self._launch.versions
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                self._launch.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            asyncio.run(self._wait_until_there())
        except BaseException:
            self.close()
            raise

    def ask(self, loop: Loop) -> Answered:
        """Send a closed loop; LoadTestError where an answer is none, or has not the length.

        Ctrl-C raises KeyboardInterrupt, though a load test by itself goes on to its report.
        """
        report, kept = self._load(loop)
        if report.interrupted:
            raise KeyboardInterrupt
        if failed := [record for record in report.records if not record.ok]:
            raise LoadTestError(
                f"{len(failed)} of {len(report.records)} requests failed: "
                f"{failed[0].error} {failed[0].message}"
            )
        lengths = {record.output_tokens for record in report.records}
        lengths |= {
            len(ids) for one in kept if isinstance(ids := one.answer.get("token_ids"), list)
        }
        if lengths != {loop.num_new_tokens}:
            raise LoadTestError(f"asked for {loop.num_new_tokens} tokens, got {sorted(lengths)}")
        first, later = report.summary.time_to_first_token, report.summary.time_per_output_token
        assert first is not None, "every answer has tokens"
        return Answered(
            seconds=report.summary.duration,
            first_token=first.p50,
            output_token=later.p50 if later else None,
            answers=tuple(one.answer for one in kept),
            first_token_p99=first.p99,
            late=report.invalid,
        )

    def close(self) -> None:
        """End it as an operator does, then whatever is left of its group."""
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _load(self, loop: Loop) -> tuple[LoadReport, list[KeptAnswer]]:
        config = LoadConfig(
            self._launch.address,
            MODEL,
            ClosedLoop(loop.concurrency),
            num_requests=loop.num_requests,
            timeout=_REQUEST_TIMEOUT,
            keep_answers=True,
        )
        lengths = parse_lengths(str(loop.num_prompt_tokens))
        work = Common(
            Synthetic(lengths, (0, loop.vocab_size - 1), loop.seed),
            options=self._launch.options,
            output_tokens=parse_lengths(str(loop.num_new_tokens)),
        )
        test = LoadTest(config, work)
        try:
            return test.run(), list(test.kept)
        except LoadTestError as error:
            raise LoadTestError(f"{error}; its log is {self._log}") from error

    async def _wait_until_there(self) -> None:
        """Return when the server knows its model and computes with it."""
        deadline = time.monotonic() + _START_TIMEOUT
        ask = Common(Synthetic(parse_lengths("1"), (0, 1)), output_tokens=parse_lengths("1")).ask(0)
        while True:
            target = open_target(self._launch.address, MODEL, _REQUEST_TIMEOUT, dict)
            try:
                await target.find()
                await target.send(ask, keep=False)
                return
            except (LoadTestError, CallFailed) as error:
                if self._process.poll() is not None:
                    raise LoadTestError(
                        f"the server has ended by itself; its log is {self._log}"
                    ) from error
                if time.monotonic() > deadline:
                    raise LoadTestError(
                        f"no answer within {_START_TIMEOUT:g} s ({error}); its log is {self._log}"
                    ) from error
            finally:
                await target.close()
            await asyncio.sleep(_LOOK_PERIOD)
