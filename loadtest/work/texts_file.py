"""Prompts from a text file, one a line."""

from __future__ import annotations

from pathlib import Path

from loadtest.errors import LoadTestError

_MAX_BYTES = 2**28


def read_lines(path: Path) -> tuple[str, ...]:
    """Return the lines of a UTF-8 file that are not blank; LoadTestError if there are none."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        lines = raw.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadTestError(f"cannot read prompts, one a line, from {path}: {error}") from error
    if len(raw) > _MAX_BYTES:
        raise LoadTestError(f"{path} has more than {_MAX_BYTES:,} bytes; give fewer prompts")
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise LoadTestError(f"{path} has no prompt; write one a line")
    return prompts
