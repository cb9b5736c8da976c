"""Writes what was measured, all or nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from loadtest.errors import LoadTestError


def write_document(content: Mapping[str, object], path: Path) -> None:
    """Write results that have no model of their own as JSON, all or nothing."""
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under another name beside `path`, and rename it when it is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise LoadTestError(f"cannot write {path}: {error.strerror}") from error
