"""The pages of reference are those of the code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from engine.requests.options import OPTIONS
from server.cli import reference
from server.cli.app import COMMANDS
from server.given_settings import KNOWN
from server.telemetry.metrics import METRICS

# In a process of its own: click keeps the help option of a command as it was first asked for.
_PRINT = "import json; from server.cli.reference import pages; print(json.dumps(pages()))"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The pages as the code has them, made beside a narrow terminal."""
    environment = {**os.environ, "COLUMNS": "60"}
    made = subprocess.check_output([sys.executable, "-c", _PRINT], env=environment)
    found: dict[str, str] = json.loads(made)
    return found


def test_pages_are_those_of_the_code_whatever_the_terminal(pages: dict[str, str]) -> None:
    written = {file: (reference.ROOT / file).read_text() for file in pages}

    assert written == pages, "python -m server.cli.reference writes them"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        (
            "server/docs/reference/cli.md",
            [f"## tokenweir {name}\n" for name in (*COMMANDS, "loadtest compare")],
        ),
        (
            "server/docs/reference/settings.md",
            [f"`{known.field.name}`" for known in KNOWN.values()],
        ),
        (
            "server/docs/reference/metrics.md",
            [f"`{metric.exported}`" for metric in METRICS.values()],
        ),
        (
            "server/docs/reference/errors.md",
            ["| `QUEUE_FULL` | `RESOURCE_EXHAUSTED` | 429 | yes |", "| 130 | Ctrl-C |"],
        ),
        ("proto/docs/options.md", [f"\n| `{option.name}`" for option in OPTIONS]),
    ],
)
def test_a_page_has_all_that_there_is(page: str, names: list[str], pages: dict[str, str]) -> None:
    assert [name for name in names if name not in pages[page]] == []
