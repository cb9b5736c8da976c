"""Prompts from a text file, one a line."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError
from engine.lines import read_lines as lines_of
from loadtest.errors import LoadTestError

_MAX_BYTES = 2**28


def read_lines(path: Path) -> tuple[str, ...]:
    """Return the lines of a UTF-8 file that are not blank; LoadTestError if there are none."""
    try:
        prompts = tuple(line for line in lines_of(path, _MAX_BYTES) if line.strip())
    except ConfigError as error:
        raise LoadTestError(str(error)) from error
    if not prompts:
        raise LoadTestError(f"{path} has no prompt; write one a line")
    return prompts
