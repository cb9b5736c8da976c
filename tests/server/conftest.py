"""Parts common to the tests of the server."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from server.telemetry.logs import OWN_LOGGERS, REQUESTS


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Restore the levels of loggers: commands that run in a test set those of their process."""
    levels = {name: logging.getLogger(name).level for name in (*OWN_LOGGERS, REQUESTS)}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
