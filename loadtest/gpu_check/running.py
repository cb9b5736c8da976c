"""Runs the parts one after the other, each in a process that may crash or hang by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from loadtest.gpu_check.child import command_of
from loadtest.gpu_check.part import Outcome, Part, Result, Settings, Status

_LOG = "log.txt"
_LAST_BYTES = 4096  # a part's log: its last line says why it crashed


def run_parts(
    parts: Sequence[Part],
    settings: Settings,
    out: Path,
    budget: float | None,
    begun: Callable[[Part], None] = lambda part: None,
) -> Iterator[Result]:
    """Yield the result of every part; `budget` is in seconds, for all of them together.

    The output of a part is added to `log.txt` in `out`. A part that is expected to take more than
    the rest of the budget is not run, and says so.
    """
    deadline = time.monotonic() + budget if budget is not None else float("inf")
    for part in parts:
        left = deadline - time.monotonic()
        if why := _obstacle(part, settings, left):
            yield Result(part.name, "not run", 0.0, why)
            continue
        begun(part)
        yield run_part(part, settings, out / _LOG, min(part.limit, left))


def run_part(part: Part, settings: Settings, log: Path, limit: float) -> Result:
    """Run one part for at most `limit` seconds; its output is added to `log`."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory, log.open("ab") as output:
        answer = Path(directory) / "answer.json"
        output.write(f"== {part.name}\n".encode())
        output.flush()
        start = output.tell()
        command = command_of(part.run, settings, part.arguments, answer)
        code = _run(command, part, output.fileno(), limit)
        seconds = time.monotonic() - started
        if answer.is_file():  # it had ended, whatever the end of the process did
            return _result(part, Outcome(**json.loads(answer.read_text())), seconds)
    if code is None:
        why = f"ended after {limit:.0f} s; {_last_line(log, start)}"
        return Result(part.name, "timed out", seconds, why)
    why = f"exit code {code}: {_last_line(log, start)}"
    return Result(part.name, "crashed", seconds, why)


def _run(command: list[str], part: Part, output: int, limit: float) -> int | None:
    """Return the exit code; None: it was ended, with all that it had started."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **part.environment},
        start_new_session=True,
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process's group; workers of a part that crashed hold the device."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(part: Part, outcome: Outcome, seconds: float) -> Result:
    statuses: dict[bool | None, Status] = {None: "measured", True: "passed", False: "failed"}
    return Result(part.name, statuses[outcome.passed], seconds, outcome.summary, outcome.found)


def _obstacle(part: Part, settings: Settings, left: float) -> str:
    """Return why a part is not run; "": it is."""
    if part.needs_device and settings.device == "cpu":
        return "needs a CUDA device, and --device is cpu"
    if part.seconds > left:
        rest = max(0.0, left)
        return f"takes about {part.seconds:.0f} s, {rest:.0f} s of the budget were left"
    return ""


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "it printed nothing"
