"""Reads UTF-8 texts that people write, whole or by lines."""

from __future__ import annotations

import os
from pathlib import Path

from engine.errors import ConfigError
from engine.json_file import read_at_most

BYTE_ORDER_MARK = "\ufeff"  # which some editors write at the beginning of a file


def read_text(path: str | os.PathLike[str], max_bytes: int) -> str:
    """Return the text of a file, without a byte order mark.

    Raises ConfigError, naming the line, for bytes that are not UTF-8, and for a file that is
    missing or has more than `max_bytes`.
    """
    try:
        with Path(path).open("rb") as file:  # or a pipe: a person gave it
            raw = read_at_most(file, max_bytes)
        return raw.decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        why = f"byte 0x{raw[error.start]:02x} in line {line} is not UTF-8"
        raise ConfigError(f"{path} cannot be read: {why}; convert the file to UTF-8") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}; give a part of it") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a UTF-8 file") from error


def split_lines(text: str) -> list[str]:
    r"""Return the lines of a text, without their ends.

    "\n" and "\r\n" alone end a line: other separators of Unicode stand inside of texts.
    """
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def read_lines(path: str | os.PathLike[str], max_bytes: int) -> list[str]:
    """Return the lines of a file; raises as `read_text`."""
    return split_lines(read_text(path, max_bytes))
