"""A server as its driver sees it: started, asked by the load test, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from loadtest.answers import KeptAnswer
from loadtest.arrival.arrival import ClosedLoop
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.lab.peers.process import WorkerError
from loadtest.lab.peers.servers.launch import MODEL, load_server
from loadtest.lab.peers.worker import LoadOptions
from loadtest.load_report import LoadReport
from loadtest.metrics import Distribution
from loadtest.runner import LoadTest
from loadtest.target.open_target import connect_to, nothing_more
from loadtest.target.target import CallFailed
from loadtest.work.ask import Answer
from loadtest.work.common import Common
from loadtest.work.lengths import parse_lengths
from loadtest.work.synthetic import Synthetic

_START_TIMEOUT = 120.0  # seconds until the first answer
_LOOK_PERIOD = 0.1  # seconds
_END_TIMEOUT = 60.0  # seconds for a server to end when it is told to
_REQUEST_TIMEOUT = 300.0  # seconds


@dataclass(frozen=True)
class Loop:
    """A closed loop; the same seed asks the same."""

    concurrency: int
    num_requests: int
    num_prompt_tokens: int
    num_new_tokens: int
    vocab_size: int
    seed: int


@dataclass(frozen=True)
class Answered:
    """Results of a closed loop: latencies in seconds, and every answer in the order of asking."""

    seconds: float
    time_to_first_token: Distribution | None
    time_per_output_token: Distribution | None
    end_to_end: Distribution | None
    answers: tuple[Answer, ...]
    client_share: float  # the load test's share of a core
    invalid: tuple[str, ...]  # why the figures are the client's


class ServerProcess:
    """A server and all below it; raises WorkerError if it does not answer."""

    def __init__(self, name: str, options: LoadOptions, log: Path) -> None:
        port = _free_port()
        try:
            self._launch = load_server(name).launch(options, port)
        except (ImportError, OSError, subprocess.CalledProcessError) as error:
            raise WorkerError(f"{type(error).__name__}: {error}") from error
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
        """Send a closed loop; WorkerError where an answer is none, or has not the length.

        Ctrl-C raises KeyboardInterrupt, though a load test by itself goes on to its report.
        """
        report, kept = self._load(loop)
        if report.interrupted:
            raise KeyboardInterrupt
        if failed := [record for record in report.records if not record.ok]:
            raise WorkerError(
                f"{len(failed)} of {len(report.records)} requests failed: "
                f"{failed[0].error} {failed[0].message}"
            )
        lengths = {record.output_tokens for record in report.records}
        lengths |= {
            len(ids) for one in kept if isinstance(ids := one.answer.get("token_ids"), list)
        }
        if lengths != {loop.num_new_tokens}:
            raise WorkerError(f"asked for {loop.num_new_tokens} tokens, got {sorted(lengths)}")
        summary = report.summary
        return Answered(
            seconds=summary.duration,
            time_to_first_token=summary.time_to_first_token,
            time_per_output_token=summary.time_per_output_token,
            end_to_end=summary.end_to_end,
            answers=tuple(one.answer for one in kept),
            client_share=report.own.processor_share if report.own else 0.0,
            invalid=report.invalid,
        )

    def close(self) -> None:
        """End it as an operator does, then whatever is left of its group."""
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

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
        test = LoadTest(config, work, watch=lambda course: None)
        try:
            return test.run(), list(test.kept)
        except LoadTestError as error:
            raise WorkerError(f"{error}; its log is {self._log}") from error

    async def _wait_until_there(self) -> None:
        """Return when the server knows its model and computes with it."""
        deadline = time.monotonic() + _START_TIMEOUT
        connect = connect_to(self._launch.address, MODEL, _REQUEST_TIMEOUT, nothing_more)
        ask = Common(Synthetic(parse_lengths("1"), (0, 1)), output_tokens=parse_lengths("1")).ask(0)
        while True:
            target = connect()
            try:
                await target.find()
                await target.send(ask, keep=False)
                return
            except (LoadTestError, CallFailed) as error:
                if self._process.poll() is not None:
                    raise WorkerError(
                        f"the server has ended by itself; its log is {self._log}"
                    ) from error
                if time.monotonic() > deadline:
                    raise WorkerError(
                        f"no answer within {_START_TIMEOUT:g} s ({error}); its log is {self._log}"
                    ) from error
            finally:
                await target.close()
            await asyncio.sleep(_LOOK_PERIOD)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
