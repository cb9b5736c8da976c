"""A process that answers a line of JSON with another one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from loadtest.errors import LoadTestError

_END_TIMEOUT = 30.0  # seconds for a process to end once nothing more is asked


class LineProcess(AbstractContextManager["LineProcess"]):
    """Runs a command that reads lines until there are no more.

    LoadTestError says that it has ended by itself, or what it could not do: the "error" of an
    answer.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """`log` gets what it writes to its standard error; without one that is ours."""
        self._why = f"its log is {log}" if log else "what it wrote says why"
        with log.open("ab") if log else nullcontext() as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                cwd=cwd,
            )
        self.pid = self._process.pid

    def ask(self, message: object) -> Any:
        """Return its answer to a message."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise LoadTestError(f"a process has ended by itself; {self._why}") from error
        return self.read()

    def read(self) -> Any:
        """Return what it says next."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise LoadTestError(f"a process has ended by itself; {self._why}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise LoadTestError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End it, for there is no more to read."""
        try:
            self._process.communicate(timeout=_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def __exit__(self, *failure: object) -> None:
        self.close()
