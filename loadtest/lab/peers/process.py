"""A worker as its driver sees it: started, asked, and watched while it should sleep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loadtest.lab.peers.worker import LoadOptions, Prompts, options_to_json

_TICKS = os.sysconf("SC_CLK_TCK")
_END_TIMEOUT = 30.0  # seconds for a worker to end once nothing more is asked


class WorkerError(Exception):
    """An engine cannot be loaded here, or failed."""


@dataclass(frozen=True)
class Sample:
    """One run of one engine."""

    seconds: float
    tokens: tuple[tuple[int, ...], ...]  # by prompt


class WorkerProcess:
    """One engine in a process of its own; raises WorkerError if it cannot be loaded."""

    def __init__(self, adapter: str, options: LoadOptions, log: Path) -> None:
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadtest.lab.peers.worker", adapter, options_to_json(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            loaded = self._answer()
        except WorkerError:
            self.close()
            raise
        self.load_seconds: float = loaded["load_seconds"]
        self.versions: Mapping[str, str] = loaded["versions"]

    def generate(self, prompts: Prompts, num_new_tokens: int) -> Sample:
        """Run the prompts together."""
        assert self._process.stdin is not None
        request = {
            "prompts": [list(prompt) for prompt in prompts],
            "num_new_tokens": num_new_tokens,
        }
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(f"the worker has ended; its log is {self._log.name}") from error
        answer = self._answer()
        tokens = tuple(tuple(row) for row in answer["tokens"])
        lengths = {len(row) for row in tokens}
        if len(tokens) != len(prompts) or lengths != {num_new_tokens}:
            raise WorkerError(
                f"asked for {len(prompts)} times {num_new_tokens} tokens, "
                f"got {len(tokens)} times {sorted(lengths)}"
            )
        return Sample(answer["seconds"], tokens)

    def cpu_seconds(self) -> float:
        """Return the processor time used so far; 0 where the system does not tell."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return 0.0
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS  # user and system, proc(5)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"the worker has died; its log is {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer
