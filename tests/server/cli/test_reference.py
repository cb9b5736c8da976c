"""The pages of reference are those of the code."""

from __future__ import annotations

import pytest

from server.cli import reference
from server.cli.app import COMMANDS
from server.given_settings import KNOWN
from server.telemetry.metrics import METRICS


def test_pages_are_those_of_the_code() -> None:
    written = {path.name: path.read_text() for path in reference.FOLDER.iterdir()}

    assert written == reference.pages(), "python -m server.cli.reference writes them"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("cli.md", [f"## tokenweir {name}\n" for name in (*COMMANDS, "loadtest compare")]),
        ("settings.md", [f"`{known.field.name}`" for known in KNOWN.values()]),
        ("metrics.md", [f"`{metric.exported}`" for metric in METRICS.values()]),
        ("errors.md", ["| `QUEUE_FULL` | `RESOURCE_EXHAUSTED` | 429 | yes |", "| 130 | Ctrl-C |"]),
    ],
)
def test_a_page_has_all_that_there_is(page: str, names: list[str]) -> None:
    assert [name for name in names if name not in reference.pages()[page]] == []


def test_the_page_does_not_depend_on_the_terminal_that_it_is_made_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = reference.pages()
    monkeypatch.setenv("COLUMNS", "60")

    assert reference.pages() == before
